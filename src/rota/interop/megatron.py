"""Megatron-Core's `--pipeline-model-parallel-layout`: which layers each stage has, in one line of letters.

    Et*3|(tt|)*29,m|L        61 transformer layers and one of multi-token prediction in 32 stages
    E embedding   t transformer layer   m multi-token prediction (MTP)   L loss   | next stage
    t*3 is ttt    (tt|)*2 is tt|tt|     groups do not nest; commas say nothing, not even between digits

Stage i is on rank i mod p, as chunk i // p. Each letter is a layer, so boundaries count E, m and L too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import final

from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.errors import FormatError, SplitError
from rota.core.placing import interleaved
from rota.core.plan import Plan
from rota.core.reading import short
from rota.cutting.partition import matching
from rota.interop.layer_boundaries import MOST_LAYERS, has_order_of, require_boundaries, stage_costs
from rota.schedules import NAMED
from rota.schedules.common import require_chain_on

_MOST_CHARACTERS = 100_000
_LETTERS = "EtmL"
_LETTER = re.compile(rf"(?P<piece>[{_LETTERS}|])(?:\*(?P<times>[0-9]{{1,5}})(?![0-9]))?(?!\*)")
_GROUP = re.compile(r"\((?P<piece>[^()]+)\)\*(?P<times>[0-9]{1,5})(?![0-9*])")
_GRAMMAR = "E, t, m, L or |, alone or as in t*3, nor a group without groups in it, as in (tt|)*2, with n up to 10,000"


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
        _require_order(self)

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


def _require_order(layout: Layout) -> None:
    """Check that E is first, L last, and MTP after all transformer layers, in one stage, the last of its rank."""
    stages, letters = layout.stages, "".join(layout.stages)
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
    homes = [stage for stage, letters in enumerate(stages) if "m" in letters]
    if len(homes) > 1:
        raise FormatError(f"m (MTP) is in the stages {short(homes).strip('[]')}; put all of them into one")
    last_chunks = len(stages) - layout.num_ranks
    if homes and homes[0] < last_chunks:
        raise FormatError(
            f"m (MTP) is in stage {homes[0]}, not the last one of its rank; put it into a stage from {last_chunks} on"
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


def _expanded(text: str) -> str:
    """The layout written out, without `*`, groups and commas."""
    places = [place for place, character in enumerate(text, 1) if character != ","]
    plain = text.replace(",", "")

    def unrolled(begin: int, end: int, is_group: bool) -> str:
        pieces: list[str] = []
        size = 0
        while begin < end:
            letter = _LETTER.match(plain, begin, end)
            group = None if letter or is_group else _GROUP.match(plain, begin, end)
            piece = letter or group
            where = f"layout, character {places[begin]}"
            if piece is None:
                raise FormatError(f"{where}: {plain[begin : min(end, begin + 12)]!r} is not {_GRAMMAR}")
            letters, times = piece["piece"], int(piece["times"] or 1)
            if group is not None:
                letters = unrolled(*group.span("piece"), is_group=True)
            size += len(letters) * times
            if size > MOST_LAYERS:  # a short layout must not fill the memory
                raise FormatError(f"{where}: {size:,} layers and stages up to here; {MOST_LAYERS:,} at most")
            pieces.append(letters * times)
            begin = piece.end()
        return "".join(pieces)

    return unrolled(0, len(plain), is_group=False)


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
    is_transformer = matching(layers, transformer)
    first, last = is_transformer.index(True), len(is_transformer) - 1 - is_transformer[::-1].index(True)
    if not all(is_transformer[first : last + 1]):
        other = is_transformer.index(False, first)
        raise SplitError(
            f"layer {other} ({layers[other]}) is between transformer layers, where Megatron has none; make it a part "
            f"of one"
        )
    letters = ["t" * sum(is_transformer[before:after]) for before, after in pairwise(cut)]
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
    return has_order_of("interleaved_1f1b", plan)
