"""`PipelineVisualizer`: a scheduled `ReneDAG` on axes of Matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from rota.compat.rene.constants import DEFAULT_ANNOTATION_ARGS, DEFAULT_LINE_ARGS, DEFAULT_RECTANGLE_ARGS
from rota.compat.rene.dag import ReneDAG
from rota.compat.rene.instruction import Instruction, ReneError, of_type
from rota.drawing.figure import require_matplotlib

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize

Looks = Mapping[type[Instruction], Mapping[str, Any]]

_OURS = "rota.compat.rene"  # what marks our artists, so that another draw takes their place
_NEAR = 0.06  # a tick that is nearer to the end than this part of the whole makes way for it


@final
class PipelineVisualizer:
    """Stage 0 on top, time to the right.

    `rectangle_args`, `annotation_args`: for each type what Matplotlib's `Rectangle` and `annotate` take, over the
    defaults; `line_args`: what `plot` takes, for the critical path. `annotation_hook(inst)`: what is written in it.
    `power_color`: a colour map, for cost by time as `normalizer` maps it to 0 to 1 (default: from 0 to the highest).
    Raises ReneError, a ValueError, for a DAG that is not scheduled.
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
        self.rectangle_args = _over(DEFAULT_RECTANGLE_ARGS, rectangle_args, kinds)
        self.annotation_args = _over(DEFAULT_ANNOTATION_ARGS, annotation_args, kinds)
        if power_color is not None and annotation_args is DEFAULT_ANNOTATION_ARGS:  # then what reads best on the colour
            self.annotation_args = {kind: {**args, "color": None} for kind, args in self.annotation_args.items()}
        self.line_args = {**DEFAULT_LINE_ARGS, **line_args}
        self.options: dict[str, Any] = {} if annotation_hook is None else {"annotation_hook": annotation_hook}
        if power_color is not None:
            self.options |= {"power_color": power_color, "normalizer": normalizer or self._from_0_to_the_highest()}

    def _from_0_to_the_highest(self) -> Normalize:
        from matplotlib.colors import Normalize

        return Normalize(0, max((inst.power for inst in self.dag.insts), default=0) or 1)

    def draw(self, ax: Axes, draw_time_axis: bool = False) -> None:
        """In place of what was drawn there before."""
        for artist in list(ax.get_children()):
            if artist.get_gid() == _OURS:
                artist.remove()
        with _marked(ax):
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
        before = [tick for tick in MaxNLocator(8).tick_values(0, total) if 0 <= tick <= total * (1 - _NEAR)]
        ax.set_xticks([*before, total])
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.6g}")
        for side in ("top", "left", "right"):
            ax.spines[side].set_visible(False)
        ax.spines["bottom"].set_bounds(0, total)

    def draw_critical_path(self, ax: Axes) -> None:
        """A line through the instructions of `get_critical_path`, from the start to the end."""
        path = self.dag.get_critical_path()
        times = [time for inst in path for time in (inst.actual_start, inst.actual_finish)]
        heights = [inst.stage_id + 0.75 for inst in path for _ in range(2)]
        with _marked(ax):
            ax.plot(times, heights, **self.line_args)


def _over(defaults: Looks, given: Looks, kinds: set[type[Instruction]]) -> dict[type[Instruction], dict[str, Any]]:
    """For each type what is given, over the defaults."""
    return {kind: {**of_type(defaults, kind, {}), **of_type(given, kind, {})} for kind in kinds}


@contextmanager
def _marked(ax: Axes) -> Iterator[None]:
    """What is added meanwhile is ours."""
    before = set(ax.get_children())
    yield
    for artist in set(ax.get_children()) - before:
        artist.set_gid(_OURS)
