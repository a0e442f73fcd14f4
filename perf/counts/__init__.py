"""Counts of kernels' instructions and memory accesses, made without a GPU."""
