"""Models that vLLM has no class for, or no longer has one."""
