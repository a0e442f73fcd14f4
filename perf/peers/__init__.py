"""Other implementations, on the same pages as ours."""
