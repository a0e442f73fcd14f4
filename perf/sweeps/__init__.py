"""Sweeps along an axis, and tables over all models."""
