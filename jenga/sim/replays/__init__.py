"""Replays: run one, write its rows, continue an interrupted one, and bounds on its prefix hits."""
