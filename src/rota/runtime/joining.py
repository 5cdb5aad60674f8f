"""How a rank joins the others of a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from rota.errors import PipelineError

Result = TypeVar("Result")


def join() -> bool:
    """Be one of the run's processes, by what torchrun left in the environment; whether this call did it."""
    if dist.is_initialized():
        return False
    if "RANK" not in os.environ:
        raise PipelineError(
            "no process group: start the script by `rota run plan.json script.py` or torchrun, or call "
            "torch.distributed.init_process_group first"
        )
    dist.init_process_group("gloo")
    return True


def on_first(doing: str, act: Callable[[], Result]) -> Result:
    """What `act` returns on the first process, told to all; where there are no others, here. Collective.

    Raises PipelineError, on all, where it fails.
    """
    told: list[Any] = [None, None]
    failure: Exception | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            told[0] = act()
        except Exception as error:  # the others must hear of it, or they would wait
            told[1], failure = f"{type(error).__name__}: {error}", error
    if dist.is_initialized():
        dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise PipelineError(f"{doing} failed on the first process ({told[1]})") from failure
    result: Result = told[0]
    return result
