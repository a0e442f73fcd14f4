"""Memory managers to compare, behind one interface."""
