"""What a model does to the memory of a GPU."""
