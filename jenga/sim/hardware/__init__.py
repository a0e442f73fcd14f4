"""GPUs, and what a model's weights leave of one."""
