"""Unmodified models as stages: each runs the model's own forward, with values of other stages received or absent."""
