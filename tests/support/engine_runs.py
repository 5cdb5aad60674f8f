"""Steps of TorchEngine and of PyTorch alone, compared with the unsplit model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rota import Cluster, Costs, Op, Plan, Stages, place
from rota.interop import TorchEngine
from support.networks import StepResult, assert_equal_steps, batch_of, chain, gradients_of, loss_fn, serial_step
from support.plain_torch import plain_steps
from support.pool import Pool

Batches = list[tuple[Tensor, Tensor]]


def plan_of(*orders: str, num_microbatches: int = 2, split: bool = False) -> Plan:
    """A chain of as many stages as ranks, by the ranks' orders."""
    costs = Costs.uniform(len(orders), weight_us=1 if split else None)
    placement = place(costs, Cluster.uniform(len(orders)))
    return Plan(placement, num_microbatches, tuple(tuple(map(Op.parse, order.split())) for order in orders))


WHOLE = plan_of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
SPLIT = plan_of("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1", split=True)


def gradients(stages: Stages, batches: Batches) -> Iterator[dict[str, Tensor | None]]:
    """The unsplit model's, added up over the steps."""
    for batch in batches:
        loss_fn(stages.run(batch[0]), batch[1]).backward()
        yield {
            f"{stage}.{name}": None if parameter.grad is None else parameter.grad.clone()
            for stage in range(len(stages))
            for name, parameter in stages[stage].named_parameters()
        }


def differ(a: Tensor | None, b: Tensor | None) -> bool:
    return (a is None) != (b is None) or (a is not None and b is not None and not torch.allclose(a, b))


def wrong_alone(pool: Pool, make: Callable[[], Stages], plan: Plan, batches: Batches) -> set[str]:
    """The gradients that PyTorch alone gets wrong after the last step."""
    ranks = [plan.placement.ranks_of(stage)[0] for stage in plan.placement.stages]
    csv, n = plan.to_csv(communication=True), plan.num_microbatches
    by_rank = pool.run(plan.num_ranks, plain_steps, csv, [*make().modules], ranks, n, batches)
    theirs = {name: gradient for results in by_rank for name, gradient in results[-1][0].items()}
    *_, right = gradients(make(), batches)
    return {name for name in right if differ(theirs[name], right[name])}


def assert_right(pool: Pool, make: Callable[[], Stages], plan: Plan, num_steps: int = 2) -> None:
    """TorchEngine has the unsplit model's losses and gradients, cleared before each step."""
    batches = [batch_of(plan.num_microbatches, seed) for seed in range(1, num_steps + 1)]
    by_rank = pool.run(plan.num_ranks, run_made, make, plan, batches)
    for step, batch in enumerate(batches):
        assert_equal_steps([results[step] for results in by_rank], serial_step(make(), *batch))


def run_made(rank: int, make: Callable[[], Stages], plan: Plan, batches: Batches) -> Any:
    return steps(TorchEngine, rank, make(), plan, batches)


def steps(
    engine: Any, rank: int, stages: Stages, plan: Plan, batches: list[Any], clear: bool = True, **options: Any
) -> list[StepResult]:
    """On each rank: the steps of an engine, gradients cleared before each or never."""
    results = []
    with engine(stages, plan, loss_fn, **options) as running:
        for parameter in running.parameters():
            parameter.grad = None
        for batch in batches:
            for parameter in running.parameters():
                parameter.grad = None if clear else parameter.grad
            loss = running.step(*batch)
            results.append(StepResult(loss, gradients_of(stages, running.local_stages)))
    return results


def two_layers() -> Stages:
    return chain(2)
