"""Warp-specialised attention of prompts on Hopper (Gluon)."""
