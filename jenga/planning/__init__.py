"""Planning: what requests need, and the geometry that is expected to waste least."""
