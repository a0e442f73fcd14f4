"""All names of vLLM that are replaced: by which function, for which reason, and when."""
