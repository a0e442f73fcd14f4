"""Multi-head latent attention (MLA) over latents in pages."""
