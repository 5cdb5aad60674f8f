"""Noticing that a run makes no progress, and reporting which rank the others wait for."""
