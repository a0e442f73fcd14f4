"""vLLM's cache specs as this package's layer types, and what is kept beside recurrent states."""
