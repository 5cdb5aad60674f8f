"""How far measured ops are apart, and which advice holds nevertheless."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import comb

from rota.calibration.measured_times import op_times_us, with_durations
from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.core.simulation import simulate
from rota.core.tasks import Amount, Kind, Task, amount_of, by_class, scalar, value_in
from rota.core.timeline import Timeline

_DOUBT = 0.1  # probability that a median lies outside of what is said of it, where there are values enough
_FEWEST = 4  # ops; how far fewer are apart says little
_NUM_DRAWS = 10


@dataclass(frozen=True)
class Spread:
    """The range in which the true median duration of each task is, by the order statistics of its measured ops.

    Attributes:
        shortest: The placement with each task at the lower end of its range.
        longest: The placement with each task at the upper end.
    """

    shortest: Placement
    longest: Placement

    @classmethod
    def of(cls, timelines: Sequence[Timeline], placement: Placement) -> Spread:
        """The spread of the timelines' ops; `placement` has everything else.

        A task whose ops all took as long as planned was simulated, and has no spread. Of fewer than four ops of a task
        (and class of micro-batches), nothing is known: the range is from 0 to twice the longest.
        """
        low: dict[tuple[int, Kind], Amount] = {}
        high: dict[tuple[int, Kind], Amount] = {}
        planned = {(task.stage, task.kind): task for task in timelines[0].plan.placement.tasks}
        for key, of_class in op_times_us(timelines).items():
            ends = []
            for c in range(placement.num_classes):
                us = value_in(planned[key].duration_us, c)
                ends.append(_median_range(of_class.get(c, [us]), us))
            low[key] = amount_of(a for a, _ in ends)
            high[key] = amount_of(b for _, b in ends)
        shortest, longest = (with_durations(placement.tasks, bound) for bound in (low, high))
        return cls(replace(placement, tasks=shortest), replace(placement, tasks=longest))

    @property
    def is_exact(self) -> bool:
        """Whether no task's ops differ."""
        return self.shortest.tasks == self.longest.tasks

    @cached_property
    def _draws(self) -> tuple[Placement, ...]:
        """Placements whose tasks are anywhere in their ranges, drawn in the same way each time."""
        chooser = random.Random(0)
        pairs = [*zip(self.shortest.tasks, self.longest.tasks, strict=True)]

        def draw(a: Task, b: Task) -> Task:
            share = chooser.random()
            return replace(
                a, duration_us=by_class(lambda x, y: round(x + share * (y - x)), a.duration_us, b.duration_us)
            )

        return tuple(replace(self.shortest, tasks=tuple(draw(*pair) for pair in pairs)) for _ in range(_NUM_DRAWS))

    def holds(self, plan: Plan, changed: Callable[[Plan], Plan]) -> bool:
        """Whether `changed` makes a plan faster with any times of tasks in their ranges, as far as was drawn."""
        if self.is_exact:
            return True
        drawn = (replace(plan, placement=placement) for placement in self._draws)
        return all(simulate(changed(before)).makespan_us < simulate(before).makespan_us for before in drawn)

    def longest_part(self, loads: Callable[[Placement], Sequence[float]], most: int) -> bool:
        """Whether part `most` has more work than the mean of the others, even if it is shortest and they are longest.

        `loads`: the work of each part, such as a stage or a rank, of a placement.
        """
        others = [us for part, us in enumerate(loads(self.longest)) if part != most]
        return bool(others) and loads(self.shortest)[most] * len(others) > sum(others)


def _median_range(times_us: Sequence[int], planned_us: int) -> tuple[int, int]:
    """The order statistics between which the true median is."""
    times, count = sorted(times_us), len(times_us)
    if {*times} == {planned_us}:
        return planned_us, planned_us
    if count < _FEWEST:
        return 0, 2 * times[-1]
    cut = num_left_out(count)
    return times[cut], times[count - 1 - cut]


def num_left_out(count: int) -> int:
    """How many of `count` values may be left out at either end, so that the true median is rarely outside the rest."""
    outside, left_out = 2 / 2**count, 0
    while (outside := outside + 2 * comb(count, left_out + 1) / 2**count) <= _DOUBT:
        left_out += 1
    return left_out


def copies(placement: Placement) -> int:
    """After how many stages a placement repeats them: stages that far apart have the same layers.

    A placement with several data streams, such as that of Chimera, has a copy of all stages for each, in the same
    order. It is the number of stages for placements whose streams differ.
    """
    stages, num_stages = placement.stages, placement.num_stages // placement.num_components
    kinds: dict[int, set[Kind]] = {}
    for task in placement.tasks:
        kinds.setdefault(task.stage, set()).add(task.kind)
    is_copied = stages == tuple(range(len(stages))) and all(kinds[s] == kinds[s % num_stages] for s in stages)
    return num_stages if is_copied else len(stages)


def with_equal_copies(placement: Placement) -> Placement:
    """The placement with the mean duration of all copies of each task: they are of the same layers."""
    period = copies(placement)
    if period == placement.num_stages:
        return placement
    of_span: dict[tuple[int, Kind], list[Amount]] = {}
    for task in placement.tasks:
        of_span.setdefault((task.stage % period, task.kind), []).append(task.duration_us)
    means = {key: by_class(lambda *us: round(sum(us) / len(us)), *amounts) for key, amounts in of_span.items()}
    tasks = (replace(task, duration_us=means[task.stage % period, task.kind]) for task in placement.tasks)
    return replace(placement, tasks=tuple(tasks))


def have_same_layers(placement: Placement) -> bool:
    """Whether all ranks hold copies of the same stages, so that no cut changes what each has to do."""
    period = copies(placement)
    held = {frozenset(s % period for s in placement.stages_on(rank)) for rank in range(placement.num_ranks)}
    return period < placement.num_stages and len(held) == 1


def rank_loads(placement: Placement) -> list[int]:
    """The work of each rank per micro-batch in µs; copies of a stage count as equally long."""
    loads = [0] * placement.num_ranks
    for task in with_equal_copies(placement).average.tasks:
        for rank in task.ranks:
            loads[rank] += scalar(task.duration_us)
    return loads
