"""What vLLM's own classes tell without an engine, asked in a process of its own."""
