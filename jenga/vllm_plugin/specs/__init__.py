"""Translation of vLLM's cache specs into layer types, and histories beside recurrent states."""
