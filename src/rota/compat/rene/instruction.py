"""What a stage does with a micro-batch, and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from rota.errors import RotaError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize

T = TypeVar("T")


class ReneError(RotaError, ValueError):
    """What was given does not fit."""


@dataclass(repr=False, eq=False)
class Instruction:
    """Subclass it for kinds of your own.

    `ReneDAG` sets when it may start and finish, `ReneDAG.schedule` when it does. `options` are the (duration, cost,
    frequency) to choose from, of which `duration`, `cost` and `frequency` are one.
    """

    stage_id: int
    micro_batch_id: int
    duration: float = 0.0

    cost: float | None = field(default=None, init=False)
    frequency: Any = field(default=None, init=False)
    options: tuple[tuple[float, float, Any], ...] = field(default=(), init=False)
    earliest_start: float = field(default=0.0, init=False)
    earliest_finish: float = field(default=0.0, init=False)
    latest_start: float = field(default=float("inf"), init=False)
    latest_finish: float = field(default=float("inf"), init=False)
    slack: float = field(default=0.0, init=False)
    actual_start: float = field(default=0.0, init=False)
    actual_finish: float = field(default=0.0, init=False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(S{self.stage_id}B{self.micro_batch_id})"

    @property
    def actual_duration(self) -> float:
        return self.actual_finish - self.actual_start

    def draw(
        self,
        ax: Axes,
        rectangle_args: Mapping[type[Instruction], Mapping[str, Any]],
        annotation_args: Mapping[type[Instruction], Mapping[str, Any]],
        annotation_hook: Callable[[Instruction], str] | None = None,
        power_color: str | None = None,
        normalizer: Normalize | None = None,
    ) -> None:
        """Override it to draw otherwise. The last three are given only where they were set; a text of the color None
        is black or white, as reads best.
        """
        from matplotlib import colormaps
        from matplotlib.patches import Rectangle

        look = {**of_type(rectangle_args, type(self), {})}
        if power_color is not None and normalizer is not None:
            look["facecolor"] = colormaps[power_color](normalizer(self.power))
        height = look.pop("height", 1.0)
        rectangle = Rectangle((self.actual_start, self.stage_id), self.actual_duration, height, **look)
        ax.add_patch(rectangle)
        text = str(self.micro_batch_id) if annotation_hook is None else annotation_hook(self)
        middle = (self.actual_start + self.actual_duration / 2, self.stage_id + height / 2)
        words = {"text": text, "xy": middle, **of_type(annotation_args, type(self), {})}
        if words.get("color", "") is None:
            words["color"] = _readable_on(rectangle.get_facecolor())
        ax.annotate(**words)

    @property
    def power(self) -> float:
        """Cost by time. Raises ReneError without a cost."""
        if self.cost is None:
            raise ReneError(f"{self} has no cost, so no power; give ReneDAG time_costs, or set its cost")
        return self.cost / self.duration if self.duration else 0.0


class Forward(Instruction):
    """A micro-batch forward through a stage."""


class Backward(Instruction):
    """A micro-batch backward through a stage."""


class ForwardBackward(Backward):
    """Forward once more, and backward at once. A rule for Backward takes it too."""


class Recomputation(Instruction):
    """Forward once more, ahead of the backward."""


def of_type(values: Mapping[type[Instruction], T], kind: type[Instruction], default: T) -> T:
    """What is there for the type, or for the nearest type that it is derived from."""
    return next((values[base] for base in kind.__mro__ if base in values), default)


def _readable_on(color: Any) -> str:
    """By the lightness that Rec. 709 gives to red, green and blue."""
    red, green, blue, _ = color
    return "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.5 else "#ffffff"
