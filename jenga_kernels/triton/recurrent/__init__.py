"""What kernels of recurrent layers share."""
