"""Attention over keys and values in pages, and what it needs: stores, scores, restored tokens."""
