"""Prompts through layers of the gated delta rule on Hopper (Gluon)."""
