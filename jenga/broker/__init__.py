"""The broker: it lends large pages of one arena to several engines."""
