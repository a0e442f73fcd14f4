"""The plugin in vLLM's workers: orders of the scheduler, host memory, and warm-up."""
