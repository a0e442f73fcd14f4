"""Benchmarks on a CPU alone: the memory manager, the simulator, and calls of kernels."""
