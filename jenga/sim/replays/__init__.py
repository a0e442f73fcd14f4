"""Replays: running one, its rows, going on where one was cut, and what none could exceed."""
