"""All processes that write or read a checkpoint together: what fails on one of them fails on all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, final

import torch.distributed as dist

from rota.errors import FormatError, PipelineError, RotaError
from rota.runtime.json_messages import all_gather_json, broadcast_json
from rota.runtime.transport import together

Result = TypeVar("Result")


class DamagedError(PipelineError):
    """A checkpoint cannot be read, on one rank at least; nothing else is wrong on any."""


@final
class Ranks:
    """All processes, in a group of their own; what fails on one of them fails on all. Collective."""

    def __init__(self) -> None:
        with together("making the group of checkpoints"):
            self.group = dist.new_group(backend="gloo")
        self.mine = dist.get_rank(self.group)

    def agreed(self, doing: str, act: Callable[[], Result]) -> Result:
        """What `act` returns here, if it succeeds on all ranks; else PipelineError on all.

        That is a DamagedError if all errors are FormatErrors.
        """
        failure: Exception | None = None
        try:
            result = act()
        except Exception as error:
            failure = error
        with together(f"{doing} for a checkpoint"):
            told = all_gather_json(_told(failure), self.group)
        failed = {rank: words for rank, words in enumerate(told) if words is not None}
        if failed:
            other = {rank: words for rank, words in failed.items() if not words["damage"]}
            raise _error(doing, *next(iter((other or failed).items()))) from failure
        return result

    def first(self, doing: str, act: Callable[[], Result]) -> Result:
        """What `act` returns on the first rank, a JSON value, on all ranks; else PipelineError on all."""
        failure: Exception | None = None
        value: dict[str, Any] = {}
        if self.mine == 0:
            try:
                value = {"result": act()}
            except Exception as error:
                failure = error
                value = {"failure": _told(error)}
        with together(f"{doing} for a checkpoint"):
            value = broadcast_json(value, group=self.group)
        if "failure" in value:
            raise _error(doing, 0, value["failure"]) from failure
        return value["result"]  # type: ignore[no-any-return]

    def gather(self, value: Any) -> list[Any]:
        """All ranks' values, which are JSON values, on all ranks."""
        with together("gathering a checkpoint's parts"):
            return all_gather_json(value, self.group)

    def close(self) -> None:
        """Destroy the group, if the caller has not; a second call does nothing."""
        group, self.group = self.group, None
        if group is not None and dist.is_initialized():
            with suppress(ValueError):  # the caller has destroyed it
                dist.destroy_process_group(group)


def _told(error: Exception | None) -> dict[str, Any] | None:
    if error is None:
        return None
    words = str(error) if isinstance(error, RotaError) else f"{type(error).__name__}: {error}"
    return {"words": words, "damage": isinstance(error, FormatError)}


def _error(doing: str, rank: int, told: dict[str, Any]) -> PipelineError:
    kind = DamagedError if told["damage"] else PipelineError
    return kind(f"checkpoint: {doing}, process {rank}: {told['words']}")
