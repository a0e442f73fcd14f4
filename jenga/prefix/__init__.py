"""Prefix caching: what is kept for other requests, in the arena and in host memory."""
