"""Figures, charts and text of which reports are made."""
