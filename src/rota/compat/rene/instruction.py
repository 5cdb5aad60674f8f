"""Instructions: what a stage does with a micro-batch, when, and for how long; and schedules, which order them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import lcm
from typing import TYPE_CHECKING, Any, TypeVar

from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.errors import RotaError
from rota.core.placing import place
from rota.core.tasks import Kind
from rota.schedules import one_f_one_b

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize

T = TypeVar("T")


class ReneError(RotaError, ValueError):
    """An argument is wrong, or does not fit the others."""


@dataclass(repr=False, eq=False)
class Instruction:
    """One instruction of a stage. Subclass it for kinds of your own.

    Times are in the unit of `ReneDAG`'s durations.

    Attributes:
        stage_id: The stage that runs it.
        micro_batch_id: The micro-batch that it is for.
        duration: How long it lasts.
        cost: What it costs, such as its energy; None if that was not given.
        frequency: The frequency that goes with `duration` and `cost`.
        options: All (duration, cost, frequency) to choose from.
        earliest_start: When it can start at the earliest; like the next four, set by `ReneDAG`.
        earliest_finish: When it can finish at the earliest.
        latest_start: When it must start at the latest, without a longer schedule.
        latest_finish: When it must finish at the latest, without a longer schedule.
        slack: `latest_start` minus `earliest_start`.
        actual_start: When it starts; set by `ReneDAG.schedule`, like `actual_finish`.
        actual_finish: When it finishes.
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
        """`actual_finish` minus `actual_start`."""
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
        """Draw this instruction. Override it to draw it in another way.

        Args:
            ax: The axes to draw on.
            rectangle_args: What `matplotlib.patches.Rectangle` is called with, by type.
            annotation_args: What `Axes.annotate` is called with, by type. Text of color None becomes black or white,
                whichever is easier to read.
            annotation_hook: Returns the text. The visualizer passes this argument only if it was given one.
            power_color: The name of a colour map; passed only if it was set.
            normalizer: Maps `power` to 0 to 1; passed only with `power_color`.
        """
        from matplotlib import colormaps, colors
        from matplotlib.patches import Rectangle

        look = {**value_of_type(rectangle_args, type(self), {})}
        if power_color is not None and normalizer is not None:
            look["facecolor"] = colormaps[power_color](normalizer(self.power))
        height = look.pop("height", 1.0)
        rectangle = Rectangle((self.actual_start, self.stage_id), self.actual_duration, height, **look)
        ax.add_patch(rectangle)
        text = str(self.micro_batch_id) if annotation_hook is None else annotation_hook(self)
        middle = (self.actual_start + self.actual_duration / 2, self.stage_id + height / 2)
        annotation = {"text": text, "xy": middle, **value_of_type(annotation_args, type(self), {})}
        if annotation.get("color", "") is None:  # black or white, by the luminance that Rec. 709 gives to colours
            red, green, blue, _ = colors.to_rgba(rectangle.get_facecolor())
            annotation["color"] = "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.5 else "#ffffff"
        ax.annotate(**annotation)

    @property
    def power(self) -> float:
        """Cost divided by duration. Raises ReneError without a cost."""
        if self.cost is None:
            raise ReneError(f"{self} has no cost, so no power; give ReneDAG time_costs, or set its cost")
        return self.cost / self.duration if self.duration else 0.0


class Forward(Instruction):
    """The forward of a micro-batch through a stage."""


class Backward(Instruction):
    """The backward of a micro-batch through a stage."""


class ForwardBackward(Backward):
    """The forward once more, and the backward directly after it. Rules for Backward apply to it too."""


class Recomputation(Instruction):
    """The forward once more, before the backward."""


class PipelineSchedule(ABC):
    """The instructions of one stage. Subclass it and implement `__iter__`.

    Args:
        num_stages: The number of pipeline stages.
        num_micro_batches: The number of micro-batches of a step.
        stage_id: The stage whose instructions are yielded, from 0.
    """

    def __init__(self, num_stages: int, num_micro_batches: int, stage_id: int) -> None:
        self.num_stages = num_stages
        self.num_micro_batches = num_micro_batches
        self.stage_id = stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1

    @abstractmethod
    def __iter__(self) -> Iterator[Instruction]:
        """Yield the stage's instructions in execution order."""


class Synchronous1F1B(PipelineSchedule):
    """1F1B, as `rota.schedules.one_f_one_b` has it."""

    def __iter__(self) -> Iterator[Instruction]:
        """Yield the stage's instructions in execution order."""
        placement = place(Costs.uniform(self.num_stages), Cluster.uniform(self.num_stages))
        for op in one_f_one_b(placement, self.num_micro_batches).orders[self.stage_id]:
            yield from self.instructions_of(op.kind, op.microbatch)

    def instructions_of(self, kind: Kind, micro_batch_id: int) -> Iterator[Instruction]:
        """Yield the instructions for one forward or one backward."""
        yield (Forward if kind is Kind.F else Backward)(self.stage_id, micro_batch_id)


class EarlyRecomputation1F1B(Synchronous1F1B):
    """1F1B in which an idle stage recomputes before its backward can start (Lai et al., "Merak", 2023).

    A stage is idle after its last forward; until then, recomputation and backward are one instruction.
    """

    def instructions_of(self, kind: Kind, micro_batch_id: int) -> Iterator[Instruction]:
        """Yield the instructions for one forward or one backward."""
        if kind is Kind.F:
            yield Forward(self.stage_id, micro_batch_id)
        elif micro_batch_id <= self.num_micro_batches - self.num_stages + self.stage_id:
            yield ForwardBackward(self.stage_id, micro_batch_id)
        else:
            yield Recomputation(self.stage_id, micro_batch_id)
            yield Backward(self.stage_id, micro_batch_id)


def value_of_type(values: Mapping[type[Instruction], T], kind: type[Instruction], default: T) -> T:
    """Return the value for a type, or for its nearest base class that has one."""
    return next((values[base] for base in kind.__mro__ if base in values), default)


# --- durations without rounding ---------------------------------------------------------------------------------------


def exact_duration(duration: float, inst: Instruction) -> Fraction:
    """Return a duration as it is written (1.4 as 7/5), or raise ReneError if it is not a number of 0 or more."""
    try:
        exact = Fraction(repr(float(duration))) if isinstance(duration, float) else Fraction(duration)
    except (TypeError, ValueError):
        exact = Fraction(-1)
    if exact < 0:
        raise ReneError(f"the duration of {inst} is {duration!r}; give a number of 0 or more")
    return exact


def in_whole_units(durations: Sequence[Fraction]) -> tuple[list[int], int]:
    """Return each duration as a whole number of equal units, and how many units make 1."""
    scale = lcm(*(duration.denominator for duration in durations))
    return [int(duration * scale) for duration in durations], scale
