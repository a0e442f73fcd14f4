"""The side of vLLM's scheduler: the manager in its words, and what it asks of the workers."""
