"""Shapes of layers in real models, and random batches of these shapes."""
