"""Blocks, schedules and the composer, where Tessel has them."""
