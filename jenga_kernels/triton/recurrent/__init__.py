"""Functions and tile sizes shared by the kernels of recurrent layers."""
