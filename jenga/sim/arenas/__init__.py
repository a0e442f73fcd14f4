"""The memory managers to compare, behind one interface."""
