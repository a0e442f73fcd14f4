"""Sessions on a GPU that is lent for minutes."""
