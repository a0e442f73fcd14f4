"""Kernels of selective state space models (Mamba-1, Mamba-2)."""
