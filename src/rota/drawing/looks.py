"""What each kind of work looks like, in figures and in terminals."""

from __future__ import annotations

from typing import NamedTuple

from rota.plan import Transfer
from rota.tasks import Kind, Op
from rota.timeline import StepEndWork, Timeline

Work = Op | Transfer | StepEndWork


class Look(NamedTuple):
    """A word for legends; a colour; and for terminals a colour of the 256, and what fills the cells after a label."""

    word: str
    color: str
    terminal_color: int
    fill: str


# Okabe and Ito's palette, which colour-blind people can tell apart; F and B differ in lightness too.
LOOKS: dict[str, Look] = {
    Kind.F: Look("forward", "#0072B2", 75, "─"),
    Kind.B: Look("backward", "#E69F00", 214, "═"),
    Kind.I: Look("input gradient", "#D55E00", 209, "━"),
    Kind.W: Look("weight gradient", "#009E73", 79, "┄"),
    Kind.R: Look("recompute", "#56B4E9", 153, "~"),
    "reduce": Look("reduce", "#CC79A7", 176, "-"),
    "optimizer": Look("optimizer", "#666666", 248, "-"),
}


def key_of(work: Work) -> str:
    """The key in LOOKS of an op, a reduction or an optimizer step."""
    assert not isinstance(work, Transfer), "transfers are not drawn"
    return str(work.kind) if isinstance(work, Op) else work.what


def shown(timeline: Timeline) -> list[str]:
    """The keys of LOOKS that occur in a timeline, in the table's order."""
    kinds = {str(op.kind) for order in timeline.plan.orders for op in order}
    ends = {key_of(span.work) for span in timeline.step_end_spans()}
    return [key for key in LOOKS if key in kinds or key in ends]
