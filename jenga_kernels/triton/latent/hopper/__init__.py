"""Warp-specialised decoding over latents on Hopper (Gluon)."""
