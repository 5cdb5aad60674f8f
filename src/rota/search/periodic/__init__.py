"""Steady states: the shortest period that a long step can repeat with, and the proof of it."""
