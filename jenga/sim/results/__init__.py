"""Rows of replays, and runs read back from them."""
