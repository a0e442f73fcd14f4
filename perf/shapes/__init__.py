"""Shapes of real models' layers, and random batches of them."""
