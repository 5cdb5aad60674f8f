"""What each kind of work looks like, in figures and in terminals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from rota.core.tasks import Kind, Op, Transfer
from rota.core.timeline import StepEndWork, Timeline

Work = Op | Transfer | StepEndWork


class Look(NamedTuple):
    """How one kind of work is drawn."""

    word: str  # for legends
    color: str  # "#RRGGBB"
    terminal_colors: tuple[int, int]  # of the 256 ANSI colours: shades of stages that are neighbours on a rank
    fill: str  # the character after a label, in a terminal
    marks: tuple[Literal["top", "bottom"], ...] = ()  # dark lines along a bar: a second cue beside its colour


#: Okabe and Ito's palette, which colour-blind people can tell apart; F and B differ in lightness too.
LOOKS: dict[str, Look] = {
    Kind.F: Look(Kind.F.word, "#0072B2", (75, 117), "─"),
    Kind.B: Look(Kind.B.word, "#E69F00", (214, 222), "═", ("bottom",)),
    Kind.I: Look(Kind.I.word, "#D55E00", (209, 217), "━", ("top",)),
    Kind.W: Look(Kind.W.word, "#009E73", (79, 122), "┄", ("top", "bottom")),
    Kind.R: Look(Kind.R.word, "#56B4E9", (153, 189), "~"),
    Kind.O: Look(Kind.O.word, "#6B6F76", (245, 248), "o"),
    Kind.L: Look(Kind.L.word, "#6B6F76", (245, 248), "l"),
    "reduce": Look("reduce", "#CC79A7", (176, 176), "-"),
    "optimizer": Look("optimizer", "#666666", (248, 248), "-"),
}

PATH_COLOR, TRANSFER_COLOR, MEMORY_COLOR, LIMIT_COLOR = "#1C2024", "#6B6F76", "#B9BDC3", "#6B6F76"
SERVICE_COLOR = "#6B6F76"  # of a shared link while it serves


def white_shares(stages: Sequence[int]) -> dict[int, float]:
    """How pale the ops of each of a rank's stages are, from 0 for the first to 0.5 for the last."""
    return {stage: 0.5 * i / max(1, len(stages) - 1) for i, stage in enumerate(stages)}


def utilisation(timeline: Timeline) -> list[tuple[str, float]]:
    """Return the name of each shared link, and the share of the makespan in which it is busy."""
    links = timeline.plan.placement.cluster.shared
    busy_us = [sum(span.duration_us for span in timeline.service_spans(i)) for i in range(len(links))]
    return [(link.name, us / (timeline.makespan_us or 1)) for link, us in zip(links, busy_us, strict=True)]


def look_key(work: Work) -> str:
    """Return the key in LOOKS of an op, a reduction or an optimizer step."""
    assert not isinstance(work, Transfer), "transfers have no look"
    return str(work.kind) if isinstance(work, Op) else work.what


def look_keys(timeline: Timeline) -> list[str]:
    """Return the keys of LOOKS that occur in a timeline, in the order of LOOKS; copies have no bars in ranks' rows."""
    kinds = {str(op.kind) for order in timeline.plan.orders for op in order if not op.kind.is_copy}
    step_ends = {look_key(span.work) for span in timeline.step_end_spans()}
    return [key for key in LOOKS if key in kinds or key in step_ends]
