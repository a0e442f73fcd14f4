"""Benchmarks of single operations (kernels)."""
