"""Every dtype crosses as it is, and gradients flow only as far back as somebody wants them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rota import Pipeline, Plan, Stages
from support.networks import (
    Layer,
    batch_of,
    chain,
    gradients_of,
    loss_fn,
    pipeline_steps,
    plan_for,
    serial_microbatches,
)
from support.pool import Pool

pytestmark = pytest.mark.dist

NUM_MICROBATCHES = 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtype(pool: Pool, dtype: torch.dtype) -> None:
    stages = chain(3)
    for module in stages.modules:
        module.to(dtype)
    inputs, targets = (tensor.to(dtype) for tensor in batch_of(NUM_MICROBATCHES))
    by_rank = pool.run(3, pipeline_steps, stages, plan_for(3), [(inputs, targets)] * 2)
    serial = serial_microbatches(stages, (inputs, targets), NUM_MICROBATCHES)
    for step in (0, 1):
        found = {key: value for results in by_rank for key, value in results[step].gradients.items()}
        assert found.keys() == serial.gradients.keys()
        for key, gradient in serial.gradients.items():
            assert found[key].dtype is dtype
            assert torch.equal(found[key], gradient)
        assert all(results[step].loss == serial.loss for results in by_rank)


class Watched(Layer):
    """Notes whether a gradient is wanted for what it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: list[bool] = []

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        self.wanted += [value.requires_grad for value in values]
        return super().forward(*values)


def freeze(stages: Stages, frozen: tuple[int, ...]) -> None:
    for stage, module in enumerate(stages.modules):
        module.requires_grad_(stage not in frozen)
        module.zero_grad(set_to_none=True)


def steps_with_frozen(rank: int, stages: Stages, plan: Plan, batch: Any, froze: list[tuple[int, ...]]) -> list[Any]:
    results = []
    with Pipeline(stages, plan, loss_fn) as pipeline:
        for frozen in froze:
            freeze(stages, frozen)
            stages[rank].wanted.clear()
            loss = pipeline.step(*batch)
            results.append((loss, gradients_of(stages, [rank]), {*stages[rank].wanted}))
    return results


def test_frozen_stages_get_no_gradients_and_those_before_them_do(pool: Pool) -> None:
    torch.manual_seed(0)
    stages, batch = Stages([Watched().double() for _ in range(3)]), batch_of(NUM_MICROBATCHES)
    froze: list[tuple[int, ...]] = [(0,), (0,), (), (0, 1), (1,), (1, 2), (0, 1, 2), ()]
    by_rank = pool.run(3, steps_with_frozen, stages, plan_for(3), batch, froze)
    for step, frozen in enumerate(froze):
        freeze(stages, frozen)
        loss = loss_fn(stages.run(batch[0]), batch[1])
        if loss.requires_grad:
            loss.backward()
        for rank in range(3):
            of_rank, gradients, wanted = by_rank[rank][step]
            assert abs(of_rank - loss.item()) < 1e-10
            expected = gradients_of(stages, [rank])
            assert gradients.keys() == expected.keys()
            for key, gradient in expected.items():
                torch.testing.assert_close(gradients[key], gradient, rtol=1e-10, atol=1e-10)
            assert wanted == {any(before not in frozen for before in range(rank))}
