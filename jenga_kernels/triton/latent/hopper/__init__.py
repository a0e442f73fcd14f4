"""Decoding over latents on Hopper, with warps that specialise (Gluon)."""
