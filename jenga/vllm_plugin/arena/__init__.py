"""How vLLM's workers lay out the arena, planned once before they start."""
