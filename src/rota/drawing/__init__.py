"""Timelines as pictures: a figure (Matplotlib), a file, or a chart for the terminal."""

from __future__ import annotations

from rota.drawing.curve import draw_frontier, save_frontier
from rota.drawing.figure import draw, save
from rota.drawing.text import to_text

__all__ = ["draw", "draw_frontier", "save", "save_frontier", "to_text"]
