"""Tables made from rows of measurements."""
