"""Every name of vLLM that is replaced: what takes its place, why, and when."""
