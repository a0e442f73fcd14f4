"""Prompts through Mamba-2 layers on Hopper (Gluon)."""
