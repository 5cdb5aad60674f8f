"""Megatron-Core's `--pipeline-model-parallel-layout`: which layers each stage has, in one line of letters.

    Et*3|(tt|)*29,m|L        61 transformer layers and one of multi-token prediction in 32 stages
    E embedding   t transformer layer   m multi-token prediction (MTP)   L loss   | next stage
    t*3 is ttt    (tt|)*2 is tt|tt|     groups do not nest; commas say nothing, not even between digits

Stage i is on rank i mod p, as chunk i // p. Each letter is a layer, so boundaries count E, m and L too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple, final

from rota.cluster import Cluster
from rota.costs import Costs
from rota.cutting.partition import matching
from rota.errors import FormatError, ScheduleError, SplitError
from rota.interop.layer_boundaries import MOST_LAYERS, require_boundaries, stage_costs
from rota.placing import interleaved
from rota.plan import Plan
from rota.reading import short
from rota.schedules import NAMED
from rota.schedules.common import require_chain_on

_MOST_CHARACTERS = 100_000
_LETTERS = "EtmL"


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """`stages[i]` has the letters of stage i, "" if it is empty. Raises FormatError if Megatron would refuse it."""

    stages: tuple[str, ...]
    num_ranks: int

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or not self.stages or len(self.stages) % self.num_ranks:
            raise FormatError(
                f"the layout has {len(self.stages)} stages for {self.num_ranks} ranks; make it a multiple, by as many "
                f"'|' less 1"
            )
        _require_order(self.stages)
        _require_one_place_for_mtp(self)

    @property
    def num_virtual(self) -> int:
        """Stages per rank."""
        return len(self.stages) // self.num_ranks

    @property
    def num_layers(self) -> int:
        """Transformer layers, Megatron's `--num-layers`."""
        return sum(stage.count("t") for stage in self.stages)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return tuple(stage % self.num_ranks for stage in range(len(self.stages)))

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The stages' boundaries as in `rota.cutting`; every letter is a layer."""
        return tuple(accumulate(map(len, self.stages), initial=0))


def _require_order(stages: Sequence[str]) -> None:
    """Check that E is first, L last, and MTP after all transformer layers."""
    letters = "".join(stages)
    if strange := letters.strip(_LETTERS):
        raise FormatError(f"the layout has {strange[0]!r}, which is not a layer; use E, t, m and L")
    for letter, name, place in (("E", "embedding", "first"), ("L", "loss", "last")):
        if letters.count(letter) != 1:
            raise FormatError(f"the layout has {letters.count(letter)} {letter} ({name}); it needs exactly one")
        end = stages[0][:1] if letter == "E" else stages[-1][-1:]
        if end != letter:
            raise FormatError(
                f"{letter} ({name}) must be {place} in the {place} stage, which is {end!r} there; move it"
            )
    if "t" in letters.partition("m")[2]:
        raise FormatError("a t (transformer layer) comes after an m (MTP); move all m after the last t")


def _require_one_place_for_mtp(layout: Layout) -> None:
    having = [stage for stage, letters in enumerate(layout.stages) if "m" in letters]
    if len(having) > 1:
        raise FormatError(f"m (MTP) is in the stages {short(having).strip('[]')}; put all of them into one")
    last_chunks = len(layout.stages) - layout.num_ranks
    if having and having[0] < last_chunks:
        raise FormatError(
            f"m (MTP) is in stage {having[0]}, not the last one of its rank; put it into a stage from {last_chunks} on"
        )


# --- reading ----------------------------------------------------------------------------------------------------------


def read_layout(text: str, num_ranks: int, num_virtual: int | None = None) -> Layout:
    """The stages of a layout for `num_ranks`. Raises FormatError with the character's place, from 1.

    `num_virtual`, if given, is the number of stages per rank that it must have.
    """
    text = text.strip()
    if len(text) > _MOST_CHARACTERS:
        raise FormatError(f"a layout of {len(text):,} characters; {_MOST_CHARACTERS:,} at most")
    layout = Layout(tuple(_expanded(text).split("|")), num_ranks)
    if num_virtual not in (None, layout.num_virtual):
        raise FormatError(
            f"the layout has {layout.num_virtual} stages per rank, not {num_virtual}; write {num_ranks} times "
            f"{num_virtual} stages"
        )
    return layout


class _Character(NamedTuple):
    at: int  # from 1
    text: str

    def wrong(self, problem: str) -> FormatError:
        found = repr(self.text) if self.text else "the end"
        return FormatError(f"layout, character {self.at}: {found} {problem}")


@final
class _Text:
    """Pieces of text, of `MOST_LAYERS` characters at most: a short layout cannot fill the memory."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.size = 0

    def add(self, piece: str, times: int, where: _Character) -> None:
        self.size += len(piece) * times
        if self.size > MOST_LAYERS:
            raise where.wrong(f"makes {self.size:,} layers and stages; {MOST_LAYERS:,} at most")
        self.pieces.append(piece * times)


def _expanded(text: str) -> str:
    """The layout written out, without `*`, groups and commas."""
    end = _Character(len(text) + 1, "")
    rest = iter([*(_Character(at, one) for at, one in enumerate(text, 1) if one != ","), end])
    outside, group = _Text(), _Text()
    opened: _Character | None = None
    here = next(rest)
    while here is not end:
        first, here = here, next(rest)
        if first.text == "(":
            if opened:
                raise first.wrong("opens a group inside of a group, which Megatron cannot read; write one of them out")
            opened, group = first, _Text()
            continue
        piece = first.text
        if piece == ")":
            if not opened or not group.pieces:
                raise first.wrong("closes no group, or one without layers; remove it, or write, for example, (tt|)*2")
            if here.text != "*":
                raise here.wrong(
                    "follows a group, which Megatron reads only with a number; write, for example, (tt|)*2"
                )
            opened, piece = None, "".join(group.pieces)
        elif piece not in (*_LETTERS, "|"):
            raise first.wrong("is unknown here; use E, t, m, L, |, commas, x*n and (…)*n")
        times = 1
        if here.text == "*":
            times, here = _number(rest)
        (group if opened else outside).add(piece, times, first)
    if opened:
        raise opened.wrong("opens a group that never ends; write, for example, (tt|)*2")
    return "".join(outside.pieces)


def _number(rest: Iterator[_Character]) -> tuple[int, _Character]:
    """The number after `*`, and the character after it."""
    first = here = next(rest)
    digits = ""
    while here.text and here.text in "0123456789":
        digits += here.text
        if len(digits) > len(str(MOST_LAYERS)):
            raise first.wrong(f"begins a number of more than {len(str(MOST_LAYERS))} digits; {MOST_LAYERS:,} at most")
        here = next(rest)
    if not digits:
        raise here.wrong("follows '*', which needs a number; write, for example, t*3")
    if here.text == "*":
        raise here.wrong("multiplies a second time, which Megatron misreads; write the product")
    return int(digits), here


# --- writing ----------------------------------------------------------------------------------------------------------


def write_layout(layout: Layout) -> str:
    """The layout in one line, repeated layers and stages written once."""
    pieces = []
    *others, last = layout.stages  # L makes the last stage unlike all others
    for letters, same in groupby(others):
        times = len([*same])
        stage = _compact(letters) + "|"
        pieces.append(f"({stage})*{times}," if times > 2 else stage * times)
    return "".join(pieces) + _compact(last)


def _compact(letters: str) -> str:
    runs = ((letter, len([*same])) for letter, same in groupby(letters))
    return "".join(f"{letter}*{times}" if times > 2 else letter * times for letter, times in runs)


# --- cuts and plans ---------------------------------------------------------------------------------------------------


def layout_of(boundaries: Sequence[int], num_ranks: int, num_mtp: int = 0) -> Layout:
    """The layout of a cut of E, transformer layers, `num_mtp` MTP layers and L. Raises SplitError or FormatError."""
    boundaries = require_boundaries(boundaries)
    num_transformers = boundaries[-1] - 2 - num_mtp
    if num_mtp < 0 or num_transformers < 0:
        raise SplitError(
            f"{boundaries[-1]} layers cannot be E, {num_mtp} MTP layers and L; boundaries count all of them"
        )
    letters = f"E{'t' * num_transformers}{'m' * num_mtp}L"
    return Layout(tuple(letters[before:after] for before, after in pairwise(boundaries)), num_ranks)


def layout_for(plan: Plan, boundaries: Sequence[int], num_mtp: int = 0) -> Layout:
    """The layout of a cut into the plan's stages.

    Raises ScheduleError if the plan has them on other ranks than Megatron, SplitError or FormatError for the cut.
    """
    require_boundaries(boundaries, plan.num_stages)
    _require_ranks(plan)
    return layout_of(boundaries, plan.num_ranks, num_mtp)


def _require_ranks(plan: Plan) -> None:
    ranks = [stage % plan.num_ranks for stage in range(plan.num_stages)]
    require_chain_on("Megatron's layout", plan.placement, ranks, "rota.interleaved(costs, cluster)")


def layout_of_layers(plan: Plan, boundaries: Sequence[int], layers: Sequence[str], transformer: str) -> Layout:
    """The layout of a cut of a model's layers, of which Megatron counts the transformer layers alone.

    The layers before them are its embedding (E); those after them, such as a last norm and the head, its loss (L).

    Args:
        plan: A plan with its stages on the ranks on which Megatron has them.
        boundaries: The stages' boundaries in `layers`, as in `rota.cutting`.
        layers: The layers' names, in order.
        transformer: A regular expression that the names of transformer layers contain, in upper or lower case.

    Returns:
        The layout of the plan's stages.

    Raises:
        ScheduleError: The plan has the stages on other ranks than Megatron.
        SplitError: The boundaries do not fit the layers, or other layers are between transformer layers.
        FormatError: Megatron would refuse the layout.
    """
    cut = require_boundaries(boundaries, plan.num_stages)
    if cut[-1] != len(layers):
        raise SplitError(f"boundaries end with {cut[-1]}, but there are {len(layers)} layers; give as many")
    found = matching(layers, transformer)
    first, last = found.index(True), len(found) - 1 - found[::-1].index(True)
    if not all(found[first : last + 1]):
        other = found.index(False, first)
        raise SplitError(
            f"layer {other} ({layers[other]}) is between transformer layers, where Megatron has none; make it a part "
            f"of one"
        )
    letters = ["t" * sum(found[before:after]) for before, after in pairwise(cut)]
    letters[0], letters[-1] = f"E{letters[0]}", f"{letters[-1]}L"
    _require_ranks(plan)
    return Layout(tuple(letters), plan.num_ranks)


def plan_of(layout: Layout, costs: Costs, num_microbatches: int, cluster: Cluster | None = None) -> Plan:
    """Megatron's plan for this layout: 1F1B, interleaved if ranks have several stages.

    `costs` are those of the stages, or of the layers, one per letter. Raises PlacementError or ScheduleError.
    """
    costs = stage_costs(costs, layout.boundaries)
    placement = interleaved(costs, cluster or Cluster.uniform(layout.num_ranks))
    return NAMED["interleaved_1f1b"](placement, num_microbatches)


def runs_in_this_order(plan: Plan) -> bool:
    """Whether Megatron, which has its own order, runs the ops in the plan's order."""
    try:
        return NAMED["interleaved_1f1b"](plan.placement, plan.num_microbatches).orders == plan.orders
    except ScheduleError:
        return False
