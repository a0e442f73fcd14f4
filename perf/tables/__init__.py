"""Tables made from rows."""
