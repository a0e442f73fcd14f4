"""Benchmarks of the memory manager and of the simulator, on one core."""
