"""Layout of the arena in vLLM's workers, planned once before they start."""
