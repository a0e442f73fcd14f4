"""Metrics of an engine's memory: Prometheus series, and a log of steps."""
