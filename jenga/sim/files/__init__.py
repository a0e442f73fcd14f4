"""Readers of untrusted files, and files that are written whole."""
