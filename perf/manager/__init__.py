"""Benchmarks of the manager and of the simulator, on one core."""
