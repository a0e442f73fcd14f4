"""What kernels of prompts through recurrent layers share on Hopper."""
