"""Timelines as pictures: figures (Matplotlib), pages for the browser, charts for the terminal, Chrome traces."""

from __future__ import annotations

from rota.drawing.chrome_trace import to_chrome_trace
from rota.drawing.figure import draw
from rota.drawing.html import to_html
from rota.drawing.saving import save, save_frontier
from rota.drawing.text import to_text

__all__ = ["draw", "save", "save_frontier", "to_chrome_trace", "to_html", "to_text"]
