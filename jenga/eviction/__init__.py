"""What is kept for other requests, and which of it goes first when memory is needed."""
