"""Short convolutions and recurrences of states in pages: Mamba, linear attention, delta rules."""
