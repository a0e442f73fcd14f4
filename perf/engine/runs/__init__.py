"""Runs of engines in processes of their own, and what a machine keeps for the next one."""
