"""Runs side by side: figures, and one HTML file."""
