"""Plan of the measurements: models, workloads, sides of a comparison, and their order."""
