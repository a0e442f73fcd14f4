"""The plugin in vLLM's scheduler process: the cache manager, and the orders to the workers."""
