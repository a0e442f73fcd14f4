"""References of the operations in `jenga_kernels.latent`."""
