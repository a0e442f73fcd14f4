"""Orders of a step: messages from the scheduler's process to the workers."""
