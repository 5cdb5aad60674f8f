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


class _At(NamedTuple):
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
        at: _At | None = _At(len(self.phases) - 1, task, k)
        if rank >= 0:
            place = next(place for place in self.side.places_on(rank) if self.side.places[place] == task)
            at = _At(len(self.phases) - 2, task, k, place)
        words: list[str] = []
        while at is not None:
            at, word = self._back(at)
            words += word
        return " ".join(self._shortened(words[::-1]))

    def _shortened(self, words: list[str]) -> Iterator[str]:
        """Without an op between two others of the same task."""
        tasks = [word.rstrip("0123456789") for word in words]
        for i, word in enumerate(words):
            if not (0 < i < len(words) - 1 and tasks[i - 1] == tasks[i] == tasks[i + 1]):
                yield word

    def _name(self, at: _At) -> str:
        placement, task = self.problem.placement, self.problem.placement.tasks[at.task]
        k = int(self.side.counts[at.task]) - 1 - at.k if self.backward else at.k
        return f"{task}{placement.microbatches(task.stage, self.problem.num_microbatches)[k]}"

    def _back(self, at: _At) -> tuple[_At | None, list[str]]:
        """Where a number comes from (None: the row begins here), and the words between, the last one first."""
        if at.place >= 0:
            return self._idle_back(at)
        if at.phase == 0:
            return None, [self._name(at)]
        if self._heads(at.phase)[at.k, at.task] == self._heads(at.phase - 1)[at.k, at.task]:
            return at._replace(phase=at.phase - 1), []
        return self._work_back(at) if at.phase % 2 == 0 else self._path_back(at)

    def _heads(self, phase: int) -> Integers:
        return self.phases[phase][0]

    def _path_back(self, at: _At) -> tuple[_At | None, list[str]]:
        heads, durations = self._heads(at.phase), self.side.durations_us
        head = heads[at.k, at.task]
        if at.k and heads[at.k - 1, at.task] + durations[at.task] == head:
            return at._replace(k=at.k - 1), [self._name(at)]
        inputs = self.side.inputs[self.side.first_input[at.task] : self.side.first_input[at.task + 1]]
        for source, lag in inputs.reshape(-1, 2).tolist():
            if heads[at.k, source] + durations[source] + lag == head:
                return at._replace(task=source), [self._name(at)]
        for arc, over in self._arcs(at):
            source = int(arc[SOURCE_TASK])
            if heads[over - 1, source] + durations[source] == head:
                return at._replace(task=source, k=over - 1), [self._name(at)]
        raise NoReasonError

    def _arcs(self, at: _At) -> Iterator[tuple[Integers, int]]:
        first = self.headroom.arcs_first
        for arc in self.headroom.arcs[first[at.task] : first[at.task + 1]]:
            over = min(-int((-arc[A] - arc[B] * at.k) // arc[C]), at.k)
            if over > 0:
                yield arc, over

    def _work_back(self, at: _At) -> tuple[_At | None, list[str]]:
        head, idle = self._heads(at.phase)[at.k, at.task], self.phases[at.phase][1]
        for place in np.flatnonzero(self.side.places == at.task).tolist():
            lines = self.headroom.least[place]
            work = lines[:, 0] + lines[:, 1] * at.k
            if idle[at.k, place] + max(0, int(np.ceil(work.max() - 1e-9))) == head:
                return at._replace(place=place), [self._word("work", place, int(work.argmax()))]
        raise NoReasonError

    def _idle_back(self, at: _At) -> tuple[_At | None, list[str]]:
        idle, rank, words = self.phases[at.phase][1], self.rank_of[at.place], [self._name(at)]
        value, first = idle[at.k, at.place], int(self.side.first_place[rank])
        heads, tasks = self._heads(at.phase - 1), self.side.tasks_on(rank).tolist()
        used = [place for place, task in enumerate(tasks, first) if self.side.counts[task]]
        if value <= min(heads[0, self.side.places[place]] for place in used):
            return None, [*words, f"first@{rank}"]
        if at.phase > 2 and self.phases[at.phase - 2][1][at.k, at.place] == value:
            return at._replace(phase=at.phase - 2), []
        frees = [heads[0, self.side.places[place]] for place in used if self.headroom.frees[place]]
        if self.headroom.frees[at.place] and value == min(frees) - self.headroom.fill_us[rank]:
            return None, [*words, self._word("frees", at.place, price_of_fill(self.side, rank))]
        if at.k and idle[at.k - 1, at.place] == value:
            return at._replace(k=at.k - 1), words
        for place, task in enumerate(tasks[: at.place - first], first):
            if self.side.after[task, at.task] and idle[at.k, place] == value:
                return at._replace(task=task, place=place), words
        for arc, over in self._arcs(at):
            if arc[PLACE] == at.place and idle[over - 1, arc[SOURCE_PLACE]] == value:
                return _At(at.phase, int(arc[SOURCE_TASK]), over - 1, int(arc[SOURCE_PLACE])), words
        lines = self.headroom.most[at.place]
        work = lines[:, 0] + lines[:, 1] * at.k
        if heads[at.k, at.task] - int(np.floor(work.min() + 1e-9)) == value:
            return _At(at.phase - 1, at.task, at.k), [self._word("idle", at.place, int(work.argmin()))]
        raise NoReasonError

    def _word(self, what: str, place: int, price: int) -> str:
        """A word about the rank of a place; the price of a byte is a quotient of whole µs and bytes."""
        rank = self.rank_of[place]
        held = int(np.abs(self.side.held_bytes[self.side.tasks_on(rank)]).sum())
        exact = Fraction(float(self.prices[rank, price])).limit_denominator(max(1, held))
        return f"{what}@{rank}:{exact}" if exact else f"{what}@{rank}"
