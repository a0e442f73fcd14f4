"""Checks that operations make before they launch anything."""
