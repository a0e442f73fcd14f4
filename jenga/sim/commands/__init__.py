"""Commands of the simulator, with their arguments and their output."""
