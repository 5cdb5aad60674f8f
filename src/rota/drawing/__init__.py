"""Timelines as pictures: figures (Matplotlib), pages for the browser, files of both, charts for the terminal."""

from __future__ import annotations

from rota.drawing.chrome_trace import to_chrome_trace
from rota.drawing.curve import draw_frontier, save_frontier
from rota.drawing.figure import draw
from rota.drawing.html import to_html
from rota.drawing.text import to_text
from rota.drawing.writing import save

__all__ = ["draw", "draw_frontier", "save", "save_frontier", "to_chrome_trace", "to_html", "to_text"]
