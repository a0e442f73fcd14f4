"""Trials of kernels that are specialised for one kind of GPU, before their first use."""
