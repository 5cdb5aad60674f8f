"""All processes that save or load a checkpoint together: if one of them fails, all of them raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, final

import torch.distributed as dist

from rota.core.errors import FormatError, PipelineError, RotaError
from rota.runtime.json_messages import all_gather_json, broadcast_json
from rota.runtime.process_group import leave
from rota.runtime.transport import collective

Result = TypeVar("Result")


class DamagedError(PipelineError):
    """At least one rank cannot read the checkpoint, and no rank failed for another reason."""


@final
class Ranks:
    """All processes, in the pipeline's group `everyone`, or in one of their own for a thread beside it.

    Collective, as are all methods except `close`.
    """

    def __init__(self, everyone: dist.ProcessGroup, is_beside: bool) -> None:
        self._is_own = is_beside
        self.group: Any = everyone
        if is_beside:
            with collective("making the group of checkpoints"):
                self.group = dist.new_group(backend="gloo")
        self.rank = dist.get_rank(self.group)

    def agreed(self, doing: str, act: Callable[[], Result]) -> Result:
        """What `act` returns here, if it succeeds on all ranks.

        Otherwise all ranks raise PipelineError: a DamagedError if all errors are FormatErrors.
        """
        failure: Exception | None = None
        words = ""
        try:
            result = act()
        except Exception as error:
            failure = error
            words = str(error) if isinstance(error, RotaError) else f"{type(error).__name__}: {error}"
        report = failure is not None, isinstance(failure, FormatError), words
        with collective(f"{doing} for a checkpoint"):
            reports = enumerate(all_gather_json(report, self.group))
        failed = [(is_damage, rank, words) for rank, (has_failed, is_damage, words) in reports if has_failed]
        if failed:
            is_damage, rank, words = min(failed)  # other errors before damage
            kind = DamagedError if is_damage else PipelineError
            raise kind(f"checkpoint: {doing}, process {rank}: {words}") from failure
        return result

    def first(self, doing: str, act: Callable[[], Result]) -> Result:
        """The JSON value that `act` returns on the first rank, on all ranks; PipelineError on all if it fails."""
        result = self.agreed(doing, act if self.rank == 0 else lambda: None)
        with collective(f"{doing} for a checkpoint"):
            shared: Result = broadcast_json(result, group=self.group)
        return shared

    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all ranks, by rank, on all ranks."""
        with collective("gathering a checkpoint's parts"):
            return all_gather_json(value, self.group)

    def close(self) -> None:
        """Let go of the group, and destroy one of its own, if the caller has not; a second call does nothing."""
        group, self.group = self.group, None
        if self._is_own and group is not None:
            leave([group])
