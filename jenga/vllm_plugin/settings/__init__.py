"""Settings of a user: environment variables, vLLM's options, refusals, and the plugin's switch."""
