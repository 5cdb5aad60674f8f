"""All ranks make the same call: where they do not, all hear which, before anything has run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import rota
from rota import Pipeline, PipelineError
from support.networks import (
    StepResult,
    assert_equal_steps,
    batch_of,
    chain,
    cleared_step,
    loss_fn,
    plan_for,
    refusal,
    serial_step,
)
from support.pool import Pool

pytestmark = pytest.mark.dist

BATCH = batch_of(4)
CALLS: dict[str, Callable[[Pipeline], Any]] = {
    "step()": lambda pipeline: pipeline.step(*BATCH),
    "step(sync=False)": lambda pipeline: pipeline.step(*BATCH, sync=False),
    "evaluate()": lambda pipeline: pipeline.evaluate(*BATCH),
    "forward()": lambda pipeline: pipeline.forward(BATCH[0]),
    "clip_grad_norm_()": lambda pipeline: pipeline.clip_grad_norm_(1.0),
    "timeline()": lambda pipeline: pipeline.timeline(),
}


def differing_calls(rank: int) -> tuple[list[str], bool, StepResult]:
    """Rank 1 makes another call than the others, in all combinations; then a step, as if nothing had happened."""
    told = []
    with Pipeline(chain(3), plan_for(3), loss_fn) as pipeline:
        pipeline.step(*BATCH)  # there is a timeline
        for parameter in pipeline.parameters():
            parameter.grad = None
        for name, call in CALLS.items():
            for other in CALLS:
                if other != name:
                    told.append(refusal(CALLS[other] if rank == 1 else call, pipeline))
        untouched = all(parameter.grad is None for parameter in pipeline.parameters())
        return told, untouched, cleared_step(pipeline, *BATCH)


def test_all_ranks_hear_of_different_calls_and_can_go_on(pool: Pool) -> None:
    results = pool.run(3, differing_calls)
    pairs = [(name, other) for name in CALLS for other in CALLS if other != name]
    for told, untouched, _ in results:
        for (name, other), words in zip(pairs, told, strict=True):
            assert words == (
                f"the ranks make different calls at once: rank 0, rank 2 call {name}; rank 1 calls {other}; make the "
                f"same calls in the same order on all ranks"
            )
        assert untouched
    assert_equal_steps([result for *_, result in results], serial_step(chain(3), *BATCH))


def other_scale(rank: int) -> list[str]:
    told = []
    with Pipeline(chain(2), plan_for(2), loss_fn, mesh=rota.mesh(pp=2, dp=2), check_data="never") as pipeline:
        for scale in (0.5 if dist.get_rank() == 3 else 1.0, 1.0 if pipeline.replica else 0.5):
            try:
                pipeline.step(*BATCH, scale=scale)
                told.append("")
            except PipelineError as error:
                told.append(str(error))
    return told


def test_ranks_of_a_pipeline_have_one_scale(pool: Pool) -> None:
    """Replicas may differ: it is how their batches are weighted."""
    for told in pool.run(4, other_scale):
        assert told == ["rank 0 of replica 1 gave step scale=1, rank 1 of replica 1 0.5; give all ranks the same", ""]
