"""The argument of a bound as data, which `problems/check.py` verifies from the problem alone.

`docs/bounds.md` has the proofs; `problems/README.md` describes the rows of words that this module writes. A row is
found backwards: from the idle time or the head that a bound uses, each step goes back to what it was computed from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from rota.search.bounds.heads_tails import (
    PLACE,
    SOURCE_PLACE,
    SOURCE_TASK,
    A,
    B,
    C,
    MemoryHeadroom,
    Side,
    both_sides,
    heads_by_phase,
)
from rota.search.bounds.memory_bounds import matched_bytes
from rota.search.bounds.memory_headroom import find_headroom, price_of_fill, prices_of
from rota.search.problem import Integers, Problem, without_common_tasks


class Proof(NamedTuple):
    """What a bound's argument is about.

    Attributes:
        argument: "load", "path" or "area".
        rank: The rank whose load or memory it is; -1 for a path.
        task: The task of the op at which both sides meet; -1 for an area.
        microbatch: The op's position among the task's micro-batches.
        with_limits: Whether memory limits are used.
        without_common: Whether the time in which all ranks work together was cut out and added.
    """

    argument: str
    rank: int
    task: int
    microbatch: int
    with_limits: bool
    without_common: bool = False


class NoReasonError(Exception):
    """A number of the bound could not be traced back."""


def certificate_of(problem: Problem, proof: Proof) -> dict[str, Any] | None:
    """The fields of a certificate for a bound on the makespan; None where its argument cannot be written down."""
    if problem.original.cluster.shared:  # which a certificate does not know
        return None
    fields: dict[str, Any] = {"argument": proof.argument}
    if proof.without_common:
        fields["without_common"] = True
        problem, _ = without_common_tasks(problem)
    names = [str(task) for task in problem.placement.tasks]
    if proof.argument == "area":
        matched = matched_bytes(problem, problem.tasks_on[proof.rank])
        assert matched is not None
        held = [[names[source], names[task], size] for source, task, size in matched]
        return fields | {"rank": proof.rank, "held": held}
    if proof.rank >= 0:
        fields["rank"] = proof.rank
    sides = both_sides(problem, step_ends=True, limits=proof.with_limits)
    for end, side in zip(("before", "after"), sides, strict=True):
        k = proof.microbatch if end == "before" else int(side.counts[proof.task]) - 1 - proof.microbatch
        trace = _Trace(problem, side, find_headroom(side), end == "after")
        try:
            fields[end] = trace.row(proof.task, k, proof.rank)
        except NoReasonError:
            return None
    return fields


class _Figure(NamedTuple):
    """The head of micro-batch k of a task after a phase, or the idle time before it at a place of its rank."""

    phase: int
    task: int
    k: int
    place: int = -1  # -1: the head


@dataclass
class _Trace:
    """Goes back from a head or an idle time to what it was computed from."""

    problem: Problem
    side: Side
    headroom: MemoryHeadroom
    backward: bool

    def __post_init__(self) -> None:
        self.phases = heads_by_phase(self.side, self.headroom)
        self.prices = prices_of(self.side)
        self.rank_of = np.repeat(np.arange(self.side.num_ranks), np.diff(self.side.first_place)).tolist()

    def row(self, task: int, k: int, rank: int) -> str:
        """The words that lead to the op's head, or to the idle time of the rank before it."""
        figure: _Figure | None = _Figure(len(self.phases) - 1, task, k)
        if rank >= 0:
            place = next(place for place in self.side.places_on(rank) if self.side.places[place] == task)
            figure = _Figure(len(self.phases) - 2, task, k, place)
        words: list[str] = []
        while figure is not None:
            figure, word = self._back(figure)
            words += word
        return " ".join(self._shortened(words[::-1]))

    def _shortened(self, words: list[str]) -> Iterator[str]:
        """Without an op between two others of the same task."""
        tasks = [word.rstrip("0123456789") for word in words]
        for i, word in enumerate(words):
            if not (0 < i < len(words) - 1 and tasks[i - 1] == tasks[i] == tasks[i + 1]):
                yield word

    def _name(self, figure: _Figure) -> str:
        placement, task = self.problem.placement, self.problem.placement.tasks[figure.task]
        k = int(self.side.counts[figure.task]) - 1 - figure.k if self.backward else figure.k
        return f"{task}{placement.microbatches(task.stage, self.problem.num_microbatches)[k]}"

    def _back(self, figure: _Figure) -> tuple[_Figure | None, list[str]]:
        """Where a number comes from (None: the row begins here), and the words between, the last one first."""
        if figure.place >= 0:
            return self._idle_back(figure)
        if figure.phase == 0:
            return None, [self._name(figure)]
        before, after = (
            heads.heads_us[figure.k, figure.task] for heads in self.phases[figure.phase - 1 : figure.phase + 1]
        )
        if before == after:
            return figure._replace(phase=figure.phase - 1), []
        return self._work_back(figure) if figure.phase % 2 == 0 else self._path_back(figure)

    def _path_back(self, figure: _Figure) -> tuple[_Figure | None, list[str]]:
        heads, durations = self.phases[figure.phase].heads_us, self.side.durations_us
        head = heads[figure.k, figure.task]
        if figure.k and heads[figure.k - 1, figure.task] + durations[figure.task] == head:
            return figure._replace(k=figure.k - 1), [self._name(figure)]
        inputs = self.side.inputs[self.side.first_input[figure.task] : self.side.first_input[figure.task + 1]]
        for source, lag in inputs.reshape(-1, 2).tolist():
            if heads[figure.k, source] + durations[source] + lag == head:
                return figure._replace(task=source), [self._name(figure)]
        for arc, over in self._arcs(figure):
            source = int(arc[SOURCE_TASK])
            if heads[over - 1, source] + durations[source] == head:
                return figure._replace(task=source, k=over - 1), [self._name(figure)]
        raise NoReasonError

    def _arcs(self, figure: _Figure) -> Iterator[tuple[Integers, int]]:
        first = self.headroom.arcs_first
        for arc in self.headroom.arcs[first[figure.task] : first[figure.task + 1]]:
            over = min(-int((-arc[A] - arc[B] * figure.k) // arc[C]), figure.k)
            if over > 0:
                yield arc, over

    def _work_back(self, figure: _Figure) -> tuple[_Figure | None, list[str]]:
        head, idle = self.phases[figure.phase].heads_us[figure.k, figure.task], self.phases[figure.phase].idle_us
        for place in np.flatnonzero(self.side.places == figure.task).tolist():
            lines = self.headroom.least[place]
            work = lines[:, 0] + lines[:, 1] * figure.k
            if idle[figure.k, place] + max(0, int(np.ceil(work.max() - 1e-9))) == head:
                return figure._replace(place=place), [self._word("work", place, int(work.argmax()))]
        raise NoReasonError

    def _idle_back(self, figure: _Figure) -> tuple[_Figure | None, list[str]]:
        idle, rank, words = self.phases[figure.phase].idle_us, self.rank_of[figure.place], [self._name(figure)]
        value, first = idle[figure.k, figure.place], int(self.side.first_place[rank])
        heads, tasks = self.phases[figure.phase - 1].heads_us, self.side.tasks_on(rank).tolist()
        used = [place for place, task in enumerate(tasks, first) if self.side.counts[task]]
        if value <= min(heads[0, self.side.places[place]] for place in used):
            return None, [*words, f"first@{rank}"]
        if figure.phase > 2 and self.phases[figure.phase - 2].idle_us[figure.k, figure.place] == value:
            return figure._replace(phase=figure.phase - 2), []
        frees = [heads[0, self.side.places[place]] for place in used if self.headroom.frees[place]]
        if self.headroom.frees[figure.place] and value == min(frees) - self.headroom.fill_us[rank]:
            return None, [*words, self._word("frees", figure.place, price_of_fill(self.side, rank))]
        if figure.k and idle[figure.k - 1, figure.place] == value:
            return figure._replace(k=figure.k - 1), words
        for place, task in enumerate(tasks[: figure.place - first], first):
            if self.side.after[task, figure.task] and idle[figure.k, place] == value:
                return figure._replace(task=task, place=place), words
        for arc, over in self._arcs(figure):
            if arc[PLACE] == figure.place and idle[over - 1, arc[SOURCE_PLACE]] == value:
                return _Figure(figure.phase, int(arc[SOURCE_TASK]), over - 1, int(arc[SOURCE_PLACE])), words
        lines = self.headroom.most[figure.place]
        work = lines[:, 0] + lines[:, 1] * figure.k
        if heads[figure.k, figure.task] - int(np.floor(work.min() + 1e-9)) == value:
            return _Figure(figure.phase - 1, figure.task, figure.k), [
                self._word("idle", figure.place, int(work.argmin()))
            ]
        raise NoReasonError

    def _word(self, what: str, place: int, price: int) -> str:
        """A word about the rank of a place; the price of a byte is a quotient of whole µs and bytes."""
        rank = self.rank_of[place]
        held = int(np.abs(self.side.held_bytes[self.side.tasks_on(rank)]).sum())
        exact = Fraction(float(self.prices[rank, price])).limit_denominator(max(1, held))
        return f"{what}@{rank}:{exact}" if exact else f"{what}@{rank}"
