"""Jobs in which a rank is killed, and the others must end by themselves."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

from support.gpu.exactness import named
from support.gpu.models import batch_of, blocks, pipeline_on

TIMEOUT_S = 10  # a rank without progress for so long ends all
LOST = 70  # the exit code of a report


def a_rank_is_killed(rank: int, device: torch.device, num_ranks: int, where: str) -> None:
    """The last rank is killed in the third step: before it, or in the forward of its second micro-batch."""
    plan = named("1f1b", num_ranks)
    with pipeline_on(device, blocks(plan.num_stages), plan, timeout_s=TIMEOUT_S) as pipeline:
        forwards = 0

        def kill(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def count(*_: Any) -> None:
            nonlocal forwards
            forwards += 1
            if forwards == 2 * plan.num_microbatches + 2:
                kill()

        if rank == num_ranks - 1 and where == "in a step":
            next(iter(pipeline.local_stages.values())).register_forward_pre_hook(count)
        for step in range(20):
            if step == 2 and rank == num_ranks - 1 and where == "between steps":
                kill()
            pipeline.step(*batch_of(plan.num_microbatches, device, step))
