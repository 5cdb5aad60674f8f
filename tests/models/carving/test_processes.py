"""Unmodified models train on several processes as on one: 1F1B, a backward in two (I and W), and both directions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rota import Cluster, Costs, Pipeline, Plan, split
from rota.models import Stages
from rota.placing import bidirectional, place
from rota.schedules import chimera, one_f_one_b, zb_h1
from support.hf_models import CASES, ModelCase
from support.pool import Pool

pytestmark = pytest.mark.dist

NUM_MICROBATCHES = 4


def plans_for(stages: Stages, num_ranks: int) -> dict[str, Plan]:
    edges = [edge[:2] for edge in stages.edges]
    cluster = Cluster.uniform(num_ranks)
    whole, in_two = (Costs.uniform(num_ranks, 10, 20 - w, w, edges=edges) for w in (0, 8))
    return {
        "1f1b": one_f_one_b(place(whole, cluster), NUM_MICROBATCHES),
        "zb_h1": zb_h1(place(in_two, cluster), NUM_MICROBATCHES),
        "chimera": chimera(bidirectional(whole, cluster), NUM_MICROBATCHES),
    }


def whole_step(model: nn.Module, case: ModelCase, batch: dict[str, Any], targets: Tensor) -> float:
    """The mean loss of the micro-batches, which are one after another."""
    total = 0.0
    for m in range(NUM_MICROBATCHES):
        part = {name: value.chunk(NUM_MICROBATCHES)[m] for name, value in batch.items()}
        loss = case.loss_fn(model(**part), targets.chunk(NUM_MICROBATCHES)[m]) / NUM_MICROBATCHES
        loss.backward()
        total += loss.item()
    return total


def differences(rank: int, num_ranks: int, name: str) -> dict[str, float]:
    """For each plan the greatest difference of the losses, and of the gradients on this rank, in two steps."""
    torch.set_num_threads(1)
    case = CASES[name]
    model = case.make_model()
    stages = split(model, num_ranks, case.cuts, example=case.make_batch(2, 8, 0))
    found = {}
    for schedule, plan in plans_for(stages, num_ranks).items():
        worst = 0.0
        with Pipeline(stages, plan, case.loss_fn) as pipeline:
            for rows, length in ((8, 8), (12, 11)):
                batch = case.make_batch(rows, length, rows)
                targets = case.make_targets(batch)
                model.zero_grad()
                expected = whole_step(model, case, batch, targets)
                wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
                model.zero_grad()
                worst = max(worst, abs(pipeline.step(batch, targets) - expected))
                for name, parameter in pipeline.named_parameters():
                    gradient, whole = parameter.grad, wanted[name]
                    if gradient is not None or whole is not None:
                        assert gradient is not None, name
                        assert whole is not None, name
                        worst = max(worst, (gradient - whole).abs().max().item())
        found[schedule] = worst
    assert found, rank
    return found


@pytest.mark.parametrize(("name", "num_ranks"), [("gpt2", 2), ("lora_gpt2", 2), ("mixtral", 4), ("t5", 4)])
def test_a_step_is_that_of_the_whole_model(pool: Pool, name: str, num_ranks: int) -> None:
    for found in pool.run(num_ranks, differences, num_ranks, name, timeout_s=240):
        assert len(found) == 3
        assert all(difference < 1e-10 for difference in found.values()), found
