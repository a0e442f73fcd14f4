"""Questions to vLLM's own classes, without an engine and in a separate process."""
