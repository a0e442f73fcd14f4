"""Attention of prompts on Hopper, with warps that specialise (Gluon)."""
