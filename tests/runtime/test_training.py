"""Training with an optimizer of one's own, and running forwards only."""

import math
from typing import Any

import pytest
import torch

from rota import Cluster, Costs, Pipeline, Plan, Stages, place
from rota.schedules import forward_only, one_f_one_b
from support.networks import batch_of, chain, loss_fn, plan_for, serial_step
from support.pool import Pool


def outputs(rank: int, stages: Stages, plan: Plan, batches: list[Any], loss: Any, **options: Any) -> list[Any]:
    results = []
    with Pipeline(stages, plan, loss, **options) as pipeline:
        for batch in batches:
            mean = pipeline.step(*batch)
            assert not any(output.requires_grad for output in pipeline.outputs.values())
            results.append((mean, pipeline.outputs, pipeline.losses))
    return results


def test_forward_only(pool: Pool) -> None:
    ranks = [2, 2, 1]
    placement = place(Costs.uniform(3), Cluster.uniform(3), ranks).forward_only()
    plan, batches = forward_only(placement, 4), [batch_of(4, seed) for seed in (1, 2)]
    for loss, targets in ((loss_fn, True), (loss_fn, False), (None, False)):
        given = [(x, target if targets else None) for x, target in batches]
        by_rank = pool.run(3, outputs, chain(3), plan, given, loss)
        for step, (x, target) in enumerate(batches):
            expected = chain(3).run(x).detach()
            for rank in range(3):
                mean, found, losses = by_rank[rank][step]
                assert math.isnan(mean) if not targets else abs(mean - loss_fn(expected, target).item()) < 1e-10
                assert [*found] == ([0, 1, 2, 3] if rank == ranks[2] else [])
                assert [*losses] == ([0, 1, 2, 3] if rank == ranks[2] and targets else [])
                torch.testing.assert_close(found, {m: expected.chunk(4)[m] for m in found}, rtol=1e-10, atol=1e-10)
                for m, of_microbatch in losses.items():
                    assert abs(of_microbatch - loss_fn(expected.chunk(4)[m], target.chunk(4)[m]).item()) < 1e-10


def test_losses_of_a_training_step(pool: Pool) -> None:
    x, target = batch_of(4)
    expected = map(loss_fn, chain(3).run(x).detach().chunk(4), target.chunk(4))
    by_rank = [step for (step,) in pool.run(3, outputs, chain(3), plan_for(3, "gpipe"), [(x, target)], loss_fn)]
    assert [found for _, found, _ in by_rank] == [{}, {}, {}]
    assert by_rank[2][2] == pytest.approx(dict(enumerate(map(torch.Tensor.item, expected))), rel=1e-10)


def train_and_evaluate(rank: int, stages: Stages, training: Plan, evaluation: Plan, batches: list[Any]) -> list[float]:
    """Two pipelines over the same stages, in turn."""
    losses = []
    with Pipeline(stages, training, loss_fn) as train, Pipeline(stages, evaluation, loss_fn) as evaluate:
        optimizer = torch.optim.SGD(train.parameters(), lr=0.05)
        for batch in batches:
            optimizer.zero_grad()
            losses.append(train.step(*batch))
            optimizer.step()
            losses.append(evaluate.step(*batch))
    return losses


def test_training_and_evaluation_take_turns(pool: Pool) -> None:
    batches = [batch_of(4, seed) for seed in range(3)]
    placement = place(Costs.uniform(2), Cluster.uniform(2))
    plans = one_f_one_b(placement, 4), forward_only(placement.forward_only(), 2)
    by_rank = pool.run(2, train_and_evaluate, chain(2), *plans, batches)
    serial, expected = chain(2), []
    optimizer = torch.optim.SGD([p for _, p in serial.named_parameters()], lr=0.05)
    for batch in batches:
        optimizer.zero_grad()
        expected.append(serial_step(serial, *batch).loss)
        optimizer.step()
        expected.append(loss_fn(serial.run(batch[0]), batch[1]).item())
    for losses in by_rank:
        assert losses == pytest.approx(expected, abs=1e-10)
