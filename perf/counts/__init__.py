"""What kernels consist of and ask of memory, counted without a GPU."""
