"""`PipelineVisualizer`: a scheduled `ReneDAG` on Matplotlib axes, and what instructions look like by default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from rota.compat.rene.dag import ReneDAG
from rota.compat.rene.instruction import (
    Backward,
    Forward,
    ForwardBackward,
    Instruction,
    Recomputation,
    ReneError,
    value_of_type,
)
from rota.core.tasks import Kind
from rota.drawing.figure import require_matplotlib
from rota.drawing.looks import LOOKS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize

Looks = Mapping[type[Instruction], Mapping[str, Any]]

_EDGE = {"edgecolor": "#000000", "linewidth": 1.0}
_TEXT = {"color": "#000000", "fontsize": 10.0, "ha": "center", "va": "center"}

#: For matplotlib.patches.Rectangle. A type that is not listed looks like its nearest base class.
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

_GID = "rota.compat.rene"  # of our artists, so that another draw replaces them
_MIN_DISTANCE = 0.06  # share of the whole time; a tick that is closer to the end is left out


@final
class PipelineVisualizer:
    """Draws a DAG with stage 0 on top and time to the right.

    Args:
        dag: A scheduled DAG.
        rectangle_args: Arguments of Matplotlib's `Rectangle` by type, which override the defaults.
        annotation_args: Arguments of `Axes.annotate` by type, which override the defaults.
        line_args: Arguments of `Axes.plot` for the critical path, which override the defaults.
        annotation_hook: Returns the text in an instruction. None: its micro-batch.
        power_color: The name of a colour map, to colour instructions by power (cost divided by duration).
        normalizer: Maps power to 0 to 1. None: from 0 to the highest power.

    Raises:
        ReneError: If the DAG is not scheduled. It is a ValueError.
        RotaError: If Matplotlib is missing.
    """

    def __init__(
        self,
        dag: ReneDAG,
        rectangle_args: Looks = DEFAULT_RECTANGLE_ARGS,
        annotation_args: Looks = DEFAULT_ANNOTATION_ARGS,
        line_args: Mapping[str, Any] = DEFAULT_LINE_ARGS,
        annotation_hook: Callable[[Instruction], str] | None = None,
        power_color: str | None = None,
        normalizer: Normalize | None = None,
    ) -> None:
        require_matplotlib()
        if not dag.scheduled:
            raise ReneError("the DAG is not scheduled; call dag.schedule() first")
        self.dag = dag
        kinds = {type(inst) for inst in dag.insts}
        self.rectangle_args = _with_defaults(DEFAULT_RECTANGLE_ARGS, rectangle_args, kinds)
        self.annotation_args = _with_defaults(DEFAULT_ANNOTATION_ARGS, annotation_args, kinds)
        if power_color is not None and annotation_args is DEFAULT_ANNOTATION_ARGS:  # black or white, by the background
            self.annotation_args = {kind: {**args, "color": None} for kind, args in self.annotation_args.items()}
        self.line_args = {**DEFAULT_LINE_ARGS, **line_args}
        self.options: dict[str, Any] = {} if annotation_hook is None else {"annotation_hook": annotation_hook}
        if power_color is not None:
            if normalizer is None:
                from matplotlib.colors import Normalize

                normalizer = Normalize(0, max((inst.power for inst in dag.insts), default=0) or 1)
            self.options |= {"power_color": power_color, "normalizer": normalizer}

    def draw(self, ax: Axes, draw_time_axis: bool = False) -> None:
        """Draw all instructions on `ax`, and replace what was drawn there before.

        Args:
            ax: The axes to draw on.
            draw_time_axis: Whether to draw the time axis; without it the axes are off.
        """
        for artist in list(ax.get_children()):
            if artist.get_gid() == _GID:
                artist.remove()
        with _set_gids(ax):
            for inst in self.dag.insts:
                inst.draw(ax, self.rectangle_args, self.annotation_args, **self.options)
        total = self.dag.total_execution_time
        ax.set_xlim(0, total or 1)
        ax.set_ylim(self.dag.num_stages, 0)
        if draw_time_axis:
            self._draw_time_axis(ax, total)
        else:
            ax.set_axis_off()

    def _draw_time_axis(self, ax: Axes, total: float) -> None:
        from matplotlib.ticker import MaxNLocator

        ax.set_axis_on()
        ax.yaxis.set_visible(False)
        ax.grid(visible=False)
        ax.set_xlabel("Time (s)")
        ticks = [tick for tick in MaxNLocator(8).tick_values(0, total) if 0 <= tick <= total * (1 - _MIN_DISTANCE)]
        ax.set_xticks([*ticks, total])
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.6g}")
        for side in ("top", "left", "right"):
            ax.spines[side].set_visible(False)
        ax.spines["bottom"].set_bounds(0, total)

    def draw_critical_path(self, ax: Axes) -> None:
        """Draw a line through the instructions of `get_critical_path`, from the start to the end."""
        path = self.dag.get_critical_path()
        times = [time for inst in path for time in (inst.actual_start, inst.actual_finish)]
        heights = [inst.stage_id + 0.75 for inst in path for _ in range(2)]
        with _set_gids(ax):
            ax.plot(times, heights, **self.line_args)


def _with_defaults(
    defaults: Looks, looks: Looks, kinds: set[type[Instruction]]
) -> dict[type[Instruction], dict[str, Any]]:
    return {kind: {**value_of_type(defaults, kind, {}), **value_of_type(looks, kind, {})} for kind in kinds}


@contextmanager
def _set_gids(ax: Axes) -> Iterator[None]:
    """Mark the artists that are added inside the `with` block as ours."""
    before = set(ax.get_children())
    yield
    for artist in set(ax.get_children()) - before:
        artist.set_gid(_GID)
