"""The side of vLLM's workers: what the scheduler asked for, done; and what runs before requests."""
