"""Plans of a step: work that is counted once and that all layers of a kind share."""
