"""Prefix caching: content kept for other requests, in the arena and in host memory."""
