"""Doors for code written to other systems: change its import lines, and it runs on Rota."""
