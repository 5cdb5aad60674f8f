"""Blocks, schedules and the composer, under the module names that Tessel gives them."""
