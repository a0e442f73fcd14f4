"""What requests need, and the cut of an arena that is expected to waste least."""
