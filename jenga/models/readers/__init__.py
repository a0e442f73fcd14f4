"""Readers of configurations, by kind of model, and the functions that they share."""
