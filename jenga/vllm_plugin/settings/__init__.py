"""What a user sets and what the plugin says to it: variables, options, refusals, the switch."""
