"""Kernels of attention over paged latents (MLA)."""
