"""Figures, charts and text that reports are made of."""
