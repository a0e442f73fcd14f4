"""Plans: how a model uses the memory of a GPU."""
