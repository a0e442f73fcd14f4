"""Copies of whole pages, and moves of tokens within them."""
