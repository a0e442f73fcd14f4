"""Files that are read from anyone and written whole."""
