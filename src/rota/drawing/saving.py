"""Figures into files; pyplot is not used."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from rota.errors import RotaError
from rota.writing import whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")


def save_drawing(draw: Callable[[Figure], object], inches: tuple[float, float], path: str | PathLike[str]) -> None:
    """What `draw` draws on its figure, as a PNG, SVG or PDF file, as the suffix says. Raises RotaError."""
    suffix = suffix_of(path, SUFFIXES)
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained")
    draw(figure)
    with whole_file(path) as partial:
        figure.savefig(partial, format=suffix[1:], dpi=150)


def suffix_of(path: str | PathLike[str], known: tuple[str, ...]) -> str:
    """Raises RotaError where it is not one of those known."""
    if not isinstance(path, (str, PathLike)):
        raise RotaError(f"a {type(path).__name__} is no path; give the name of a file that ends in {', '.join(known)}")
    suffix = Path(path).suffix.lower()
    if suffix not in known:
        raise RotaError(f"cannot tell the format of {str(path)!r}: let its name end in {', '.join(known)}")
    return suffix


def require_matplotlib() -> None:
    """Raises RotaError, with the remedy, where it is missing."""
    if find_spec("matplotlib") is None:
        raise RotaError("drawing needs Matplotlib, which is not installed: pip install 'rota[draw]'")
