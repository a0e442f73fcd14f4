"""Backends of attention: keys and values, latents, encoder outputs, images, token budgets."""
