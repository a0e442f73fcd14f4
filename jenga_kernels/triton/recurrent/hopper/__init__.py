"""Functions shared by kernels of prompts through recurrent layers on Hopper."""
