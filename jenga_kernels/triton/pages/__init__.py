"""Kernels of whole pages."""
