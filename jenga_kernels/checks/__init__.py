"""What operations check before they launch anything."""
