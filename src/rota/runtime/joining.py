"""How a rank joins the others of a run."""

from __future__ import annotations

import os

import torch.distributed as dist

from rota.errors import PipelineError


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
