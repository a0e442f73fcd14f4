"""Runs side by side, as figures and as one HTML file."""
