"""All processes that write or read a checkpoint together: what fails on one of them fails on all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, final

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from rota.errors import LostRankError, PipelineError, RotaError
from rota.runtime.transport import together

Result = TypeVar("Result")


@final
class Ranks:
    """All processes, in a group of their own; what fails on one of them fails on all. Collective."""

    def __init__(self) -> None:
        with together("making the group of checkpoints"):
            self.group = dist.new_group(backend="gloo")
        self.mine = dist.get_rank(self.group)
        self._size = dist.get_world_size(self.group)

    def agreed(self, doing: str, act: Callable[[], Result]) -> Result:
        """What `act` returns here, if it succeeds on all ranks; else PipelineError on all."""
        failure: Exception | None = None
        try:
            result = act()
        except Exception as error:
            failure = error
        told: list[Any] = [None] * self._size
        with together(f"{doing} for a checkpoint"):
            dist.all_gather_object(told, failure and _words(failure), group=self.group)
        for rank, words in enumerate(told):
            if words is not None:
                raise PipelineError(f"checkpoint: {doing}, process {rank}: {words}") from failure
        return result

    def first(self, doing: str, act: Callable[[], Result]) -> Result | None:
        """What `act` returns on the first rank, None on the others."""
        return self.agreed(doing, act if self.mine == 0 else lambda: None)

    def gather(self, value: Result) -> list[Result]:
        """All ranks' values on the first rank."""
        values: list[Any] = [None] * self._size
        with together("gathering a checkpoint's parts"):
            dist.gather_object(value, values if self.mine == 0 else None, group=self.group, group_dst=0)
        return values

    def broadcast(self, value: Result) -> Result:
        """The first rank's value, on all."""
        values = [value]
        with together("telling which checkpoint to load"):
            dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def close(self) -> None:
        group, self.group = self.group, None
        if group is not None and dist.is_initialized():
            with suppress(ValueError):  # the caller has destroyed it
                dist.destroy_process_group(group)


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, RotaError) else f"{type(error).__name__}: {error}"


@contextmanager
def told_on_all(doing: str) -> Iterator[None]:
    """Around PyTorch's collective reading and writing, which fails on all ranks where one does."""
    try:
        yield
    except CheckpointException as error:
        rank, (first, _) = next(iter(error.failures.items()))
        raise PipelineError(f"checkpoint: {doing}, process {rank}: {type(first).__name__}: {first}") from error
    except RuntimeError as error:
        raise LostRankError(f"lost a rank while {doing}") from error
