"""Backends of vLLM's layers and the metadata of their steps, served by `jenga_kernels`."""
