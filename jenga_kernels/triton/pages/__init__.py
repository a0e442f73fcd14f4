"""Kernels that copy or clear whole pages."""
