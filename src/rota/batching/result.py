"""What planning a batch returns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rota.batching.bounds import ALL_ORDERS, BatchBound
from rota.core.plan import Plan
from rota.core.simulation import simulate
from rota.core.sizes import Size
from rota.core.text import angle_repr, count_text, fitted, time_text
from rota.core.timeline import Timeline


@dataclass(frozen=True)
class BatchPlan:
    """A batch's micro-batches and the plan that runs them.

    Attributes:
        plan: The plan. Its micro-batches are numbered in the order in which they are begun.
        groups: [num_microbatches]: for each micro-batch its samples, as indices into the lengths.
        sizes: [num_microbatches]: the size of each micro-batch.
        makespan_us: The plan's makespan.
        bounds: The highest proven bound among each set of plans, the largest set first.
    """

    plan: Plan
    groups: tuple[tuple[int, ...], ...]
    sizes: tuple[Size, ...]
    makespan_us: int
    bounds: tuple[BatchBound, ...]

    def __str__(self) -> str:
        """One line."""
        sizes = f"{count_text(sum(map(len, self.groups)), 'sample')} in {len(self.groups)} micro-batches"
        return f"BatchPlan of {sizes}: {time_text(self.makespan_us)}, lower bound {time_text(self.bound_us)}"

    __repr__ = angle_repr

    @property
    def bound(self) -> BatchBound:
        """The highest bound; `bound.among` names the plans that it covers."""
        return max(self.bounds, key=lambda bound: bound.us)

    @property
    def bound_us(self) -> int:
        """The highest lower bound in µs; see `bound`."""
        return self.bound.us

    @property
    def gap(self) -> float:
        """(makespan - bound) / makespan; 0 where nothing among `bound.among` is better."""
        return (self.makespan_us - self.bound_us) / self.makespan_us if self.makespan_us else 0.0

    @property
    def gap_of_all_orders(self) -> float:
        """As `gap`, with the highest bound that holds for all orders of the grouping."""
        us = max(bound.us for bound in self.bounds if bound.among == ALL_ORDERS)
        return (self.makespan_us - us) / self.makespan_us if self.makespan_us else 0.0

    @cached_property
    def timeline(self) -> Timeline:
        """The plan, simulated."""
        return simulate(self.plan)

    def to_text(self, width: int | None = None) -> str:
        """The makespan, and its distance from each bound, in lines of at most `width`."""
        samples = sum(map(len, self.groups))
        lines = [f"{samples} samples in {len(self.groups)} micro-batches: {time_text(self.makespan_us)}"]
        for bound in self.bounds:
            slower = self.makespan_us / bound.us - 1 if bound.us else 0.0
            lines.append(f"  at most {slower:.2%} above the best of {bound.among}: {bound.why}")
        return "\n".join(fitted(line, width) for line in lines)
