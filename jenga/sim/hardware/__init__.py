"""GPUs, and the memory that a model's weights leave for the arena."""
