"""Kernels of the short convolutions of recurrent layers."""
