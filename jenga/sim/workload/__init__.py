"""Requests to replay: recorded, drawn from distributions, or made up."""
