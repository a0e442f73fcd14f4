"""Benchmarks of operations."""
