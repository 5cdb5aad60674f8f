"""Names for the ops of PyTorch's schedules with one stage per rank, which do not name them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.profiler import record_function

from rota.torch_internals import COMPUTE_LOSS, stage_of


@contextmanager
def named_actions(schedule: Any) -> Iterator[None]:
    """In the block, a profiler sees the ops of a PyTorch schedule by the names that `rota import trace` reads.

    For Schedule1F1B and others with one stage per rank. Schedules with several stages per rank name their actions
    themselves, and do not change.
    """
    if not isinstance(schedule, PipelineScheduleSingle):
        yield
        return
    stage = stage_of(schedule)
    wrapped: list[tuple[Any, str, Callable[..., Any]]] = [
        (stage, "forward_one_chunk", _named(stage.forward_one_chunk, f"PP:{stage.stage_index}F", 0)),
        (stage, "backward_one_chunk", _named(stage.backward_one_chunk, f"PP:{stage.stage_index}B", 0)),
    ]
    if stage.is_last:
        losses = _named(getattr(schedule, COMPUTE_LOSS), f"PP:{stage.stage_index}LOSS", 3)
        wrapped.append((schedule, COMPUTE_LOSS, losses))
    for holder, name, function in wrapped:
        setattr(holder, name, function)
    try:
        yield
    finally:
        for holder, name, _ in wrapped:
            delattr(holder, name)  # the class's own method is visible again


def _named(function: Callable[..., Any], name: str, microbatch_at: int) -> Callable[..., Any]:
    """`function`, recorded under `name` and the micro-batch, which is its argument at `microbatch_at`."""

    def recorded(*arguments: Any, **options: Any) -> Any:
        with record_function(f"{name}{arguments[microbatch_at]}"):
            return function(*arguments, **options)

    return recorded
