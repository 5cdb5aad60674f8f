"""What instructions look like, if nothing else is said."""

from __future__ import annotations

from typing import Any

from rota.compat.rene.instruction import Backward, Forward, ForwardBackward, Instruction, Recomputation
from rota.drawing.looks import LOOKS
from rota.tasks import Kind

_EDGE = {"edgecolor": "#000000", "linewidth": 1.0}
_TEXT = {"color": "#000000", "fontsize": 10.0, "ha": "center", "va": "center"}

#: For matplotlib.patches.Rectangle. A type that is not there looks as the one that it is derived from.
DEFAULT_RECTANGLE_ARGS: dict[type[Instruction], dict[str, Any]] = {
    Instruction: {"facecolor": "#cccccc", **_EDGE},
    Forward: {"facecolor": LOOKS[Kind.F].color, **_EDGE},
    Backward: {"facecolor": LOOKS[Kind.B].color, **_EDGE},
    ForwardBackward: {"facecolor": LOOKS[Kind.I].color, **_EDGE},
    Recomputation: {"facecolor": LOOKS[Kind.R].color, **_EDGE},
}

#: For matplotlib.axes.Axes.annotate.
DEFAULT_ANNOTATION_ARGS: dict[type[Instruction], dict[str, Any]] = {
    Instruction: {**_TEXT},
    Forward: {**_TEXT, "color": "#ffffff"},
    Backward: {**_TEXT},
    ForwardBackward: {**_TEXT},
    Recomputation: {**_TEXT},
}

#: For matplotlib.axes.Axes.plot, of the critical path.
DEFAULT_LINE_ARGS: dict[str, Any] = {"color": "#d81b60", "linewidth": 4.0}
