"""What an engine tells people of its memory: Prometheus series, and a log of steps."""
