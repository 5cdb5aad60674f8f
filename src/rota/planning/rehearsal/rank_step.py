"""What one rank of a rehearsal records of a step, and the times of what ends the step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from rota.plan import Plan

_WARM_UP_MESSAGES = 32  # until allocators keep their pages, and connections have grown their windows
_MOST_WARM_UPS = 4


def num_warm_ups(plan: Plan) -> int:
    """Number of steps that are not measured: enough for each route to have carried some 32 messages."""
    return min(max(-(-_WARM_UP_MESSAGES // plan.num_microbatches), 1), _MOST_WARM_UPS)


@dataclass(slots=True)
class RankStep:
    """One step of one rank, in ns of the machine's monotonic clock.

    The first three are by op, in the rank's order. Messages are (route, position, time). Step ends are (start, end) of
    the reduction and of the optimizer step, in the order of `Plan.step_end_ranks`. `ready_ns`: when the rank was ready
    to receive a message, where its device knows: before that, it does not travel.
    """

    starts_ns: list[int]
    ends_ns: list[int]
    late_ns: list[int]
    sent: list[tuple[int, int, int]]
    arrived: list[tuple[int, int, int]]
    step_ends_ns: list[tuple[int, int, int, int]]
    ready_ns: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass(slots=True)
class RankReport:
    """All steps of one rank, and the most bytes that its ops' buffers and its process had, if it allocated.

    On an accelerator the latter is what PyTorch's allocator counts there.
    """

    rank: int
    steps: list[RankStep] = field(default_factory=list)
    held_bytes: int | None = None
    process_bytes: int | None = None

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankReport:
        """The report that `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "steps": [RankStep(**step) for step in fields["steps"]]})


def step_ends_ns(plan: Plan, rank: int, start_ns: int, ends_ns: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """When what ends a step that began at `start_ns` would begin and end, by when its ops no longer occupy the rank.

    Reductions overlap the ops, each after its stage's last gradient; the optimizer steps follow.
    """
    order = plan.orders[rank]
    ends = [plan.placement.step_ends[i] for i, of_rank in plan.step_end_ranks if of_rank == rank]
    reduced_ns, reductions = start_ns, []
    for end in ends:
        gradients = (
            ended
            for op, ended in zip(order, ends_ns, strict=True)
            if op.stage == end.stage and op.kind.makes_weight_gradients
        )
        reduce_ns = max([reduced_ns, *gradients])
        reduced_ns = reduce_ns + 1000 * end.reduce_us
        reductions.append((reduce_ns, reduced_ns))
    free_ns = max([reduced_ns, *ends_ns[-1:]])
    step_ends = []
    for end, reduction in zip(ends, reductions, strict=True):
        step_ends.append((*reduction, free_ns, free_ns + 1000 * end.optimizer_us))
        free_ns += 1000 * end.optimizer_us
    return step_ends
