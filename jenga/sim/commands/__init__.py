"""The commands of the simulator, their arguments and what they print."""
