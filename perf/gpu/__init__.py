"""Tools for sessions of some minutes on a borrowed GPU."""
