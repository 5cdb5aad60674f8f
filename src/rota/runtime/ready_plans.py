"""Plans that are ready to run: all that a step needs of a plan is made before the step, in the time of an earlier one.

    pipeline.prepare(plan, sizes) ──▶ Execution, MicrobatchInputs, reductions ──▶ step(…, plan=plan)    swaps, and runs

The plans of one pipeline have the same tasks on the same ranks, and the same edges. Everything else may differ: the
number of micro-batches, their durations and sizes, and all orders.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from rota.core.checking import check
from rota.core.errors import PipelineError
from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.runtime.compute import Compute
from rota.runtime.execution import Execution
from rota.runtime.known_layouts import Size
from rota.runtime.launcher_files import digest
from rota.runtime.microbatch_inputs import MicrobatchInputs
from rota.runtime.reducing.gradient_sync import Reductions

_MOST_READY = 8  # a plan that is made for one batch is not used again


@final
@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ReadyPlan:
    """A plan, how this rank runs it, and what it reads of a batch.

    `number` is the same on all ranks that have the same plan; 0 for the plan of the pipeline. `sizes`: of each
    micro-batch, as `Pipeline.prepare` was given them; () if they are not known. `reductions`: None in evaluation.
    """

    plan: Plan
    number: int
    sizes: tuple[Size, ...]
    execution: Execution[Compute]
    inputs: MicrobatchInputs
    reductions: Reductions | None

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows of each micro-batch, as all ranks know them; () if they do not."""
        return tuple(size[0] for size in self.sizes)


@final
class ReadyPlans:
    """The plans of a pipeline that are ready, those that were used last. `make` makes one: (plan, number, sizes)."""

    def __init__(self, base: Plan, make: Callable[[Plan, int, tuple[Size, ...]], ReadyPlan]) -> None:
        self._make, self._placement = make, base.placement
        self._ready: OrderedDict[int, ReadyPlan] = OrderedDict()  # by the identity of the plan
        self.base = make(base, 0, ())

    def get(self, plan: Plan | None, sizes: Sequence[Sequence[int]] = ()) -> ReadyPlan:
        """The plan, ready; it is made ready now if it is not. None: that of the pipeline."""
        if plan is None or plan is self.base.plan:
            if sizes:
                raise PipelineError("sizes are given without a plan; give step the plan that they belong to")
            return self.base
        given = tuple(tuple(size) for size in sizes)
        found = self._ready.get(id(plan))
        if found is None or found.plan is not plan or found.sizes != given:
            found = self._made(plan, given)
            self._ready[id(plan)] = found
        self._ready.move_to_end(id(plan))  # it was used last, so it is the last to go
        if len(self._ready) > _MOST_READY:
            self._ready.popitem(last=False)
        return found

    def _made(self, plan: Plan, sizes: tuple[Size, ...]) -> ReadyPlan:
        refuse_other_placement(plan.placement, self._placement)
        _refuse_sizes(sizes, plan.num_microbatches)
        check(plan)
        return self._make(plan, _number_of(plan, sizes), sizes)


def refuse_other_placement(placement: Placement, base: Placement) -> None:
    """Raises PipelineError unless the tasks are on the ranks they have in `base`, with the same edges between them."""
    before, given = ([(*map(str, (task,)), task.ranks) for task in of.tasks] for of in (base, placement))
    if before != given:
        other = next((a, b) for a, b in zip([*before, None], [*given, None], strict=False) if a != b)
        known, found = ("nothing" if each is None else f"{each[0]} on rank {each[1]}" for each in other)
        raise PipelineError(
            f"the plan of this step has {found} where the pipeline's plan has {known}; plan each batch for the same "
            f"stages on the same ranks, or make another Pipeline"
        )
    if placement.num_ranks != base.num_ranks or _edges(placement) != _edges(base):
        raise PipelineError(
            f"the plan of this step has {placement.num_ranks} ranks and the edges {_edges(placement)}, the pipeline's "
            f"plan {base.num_ranks} and {_edges(base)}; plan each batch for the same placement"
        )


def _edges(placement: Placement) -> list[tuple[int, int]]:
    return [(edge.source, edge.target) for edge in placement.edges]


def _refuse_sizes(sizes: tuple[Size, ...], num_microbatches: int) -> None:
    if sizes and len(sizes) != num_microbatches:
        raise PipelineError(
            f"sizes has {len(sizes)} entries for {num_microbatches} micro-batches; give (rows, length) of each"
        )
    for m, size in enumerate(sizes):
        whole = all(type(number) is int and number >= 0 for number in size)
        if not size or not whole or len(size) != len(sizes[0]):
            raise PipelineError(
                f"sizes[{m}] is {size!r}; give whole numbers of 0 or more, rows first, the same number for each "
                f"micro-batch, such as (rows, length)"
            )


def _number_of(plan: Plan, sizes: tuple[Size, ...]) -> int:
    """The same number of 1 or more for the same plan and sizes; another one for others."""
    text = f"{digest(plan)}{sizes}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 2 | 1
