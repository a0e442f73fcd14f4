"""Eviction: the worth of checkpoints, and the order in which they go."""
