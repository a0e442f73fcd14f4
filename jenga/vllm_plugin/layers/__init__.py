"""vLLM's layers and what they share in a step, served by `jenga_kernels`."""
