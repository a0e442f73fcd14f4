"""Kernels of one kind of GPU: which passed their trials on this machine, and are used."""
