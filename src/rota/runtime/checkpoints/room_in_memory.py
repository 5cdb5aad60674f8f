"""Whether the states in memory of all ranks fit: in the memory of this machine, and in the limits of the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, final

from rota.runtime.checkpoints.in_memory import StatesInMemory
from rota.runtime.host_memory import available_bytes
from rota.runtime.pipeline import Pipeline
from rota.simulation import simulate
from rota.units import size_text


class Found(NamedTuple):
    """Whether they fit, and in words: what they need and what there is. `most_bytes`: of the rank that needs most."""

    fits: bool
    text: str
    most_bytes: int


class _Told(NamedTuple):
    """What a process tells the others."""

    needed_bytes: int
    allocated_bytes: int
    available_bytes: int | None
    is_over: bool
    is_full: bool


@final
class RoomInMemory:
    """Counts what the states of a pipeline's ranks need, and what there is."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def count(self, in_memory: StatesInMemory, is_full: bool, share: Callable[[Any], list[Any]]) -> Found:
        """Whether the states of all ranks fit, as they are now. Collective.

        Args:
            in_memory: where this process keeps its states.
            is_full: this process ran out of memory for its states before.
            share: returns all processes' JSON values.
        """
        needed_bytes, tensor_bytes = in_memory.count()
        is_over = self._is_over(tensor_bytes)
        mine = _Told(needed_bytes, in_memory.allocated_bytes, available_bytes(), is_over, is_full)
        return _found([_Told(*row) for row in share(mine)])

    def _is_over(self, tensor_bytes: int) -> bool:
        """Whether this rank's states exceed the plan's limit, which counts the memory of the host for a CPU only."""
        limit_bytes = self._pipeline.plan.placement.cluster.limit_bytes[self._pipeline.rank]
        if limit_bytes is None or self._pipeline.device.type != "cpu":
            return False
        return self._planned_bytes + tensor_bytes > limit_bytes

    @cached_property
    def _planned_bytes(self) -> int:
        """This rank's peak in the plan, without the states in memory that the plan counts."""
        plan, rank = self._pipeline.plan, self._pipeline.rank
        counted_bytes = plan.placement.snapshot_bytes
        return simulate(plan).peak_memory_bytes[rank] - (counted_bytes[rank] if counted_bytes else 0)


def _found(told: Sequence[_Told]) -> Found:
    all_bytes = sum(each.needed_bytes for each in told)
    free = [each.available_bytes for each in told if each.available_bytes is not None]
    room_bytes = all_bytes
    if free:
        room_bytes = min(free) + sum(min(each.needed_bytes, each.allocated_bytes) for each in told)
    over = [process for process, each in enumerate(told) if each.is_over]
    full = [process for process, each in enumerate(told) if each.is_full]
    if over:
        why = f"the plan's limit for process {over[0]} has no room for {size_text(told[over[0]].needed_bytes)}"
    elif full:
        why = f"process {full[0]} ran out of memory for its state"
    else:
        why = f"this machine has {size_text(room_bytes)} for them"
    return Found(
        fits=not over and not full and all_bytes <= room_bytes,
        text=f"they need {size_text(all_bytes)}, and {why}",
        most_bytes=max(each.needed_bytes for each in told),
    )
