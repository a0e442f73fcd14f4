"""Other implementations, which run on the same pages as ours."""
