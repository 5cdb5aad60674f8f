"""Noticing that a run does not go on, and reporting which rank the others wait for."""
