"""Steps whose losses are means or have counts, with losses that stages add, and the same by the unsplit model."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import rota
from rota import Pipeline, Plan, Stages
from support.meshed import on_each
from support.networks import gradients_of, loss_fn
from support.pool import Pool

Batch = tuple[Tensor, Tensor]
Gradients = dict[tuple[int, str], Tensor]


class Case(NamedTuple):
    """`rounds` of steps; `clear`: gradients are cleared after each round. Batches are dealt over `dp` replicas."""

    stages: Stages
    plan: Plan
    rounds: list[list[Batch]]
    loss_fn: Callable[[Tensor, Tensor], Any] = loss_fn
    dp: int = 1
    clear: bool = True
    wrap: Callable[..., nn.Module] | None = None
    recompute: str = "none"
    scales: tuple[float, ...] = ()


def scale_of(case: Case, step: int, num_steps: int) -> float:
    return case.scales[step] if case.scales else 1 / num_steps


def steps_on(rank: int, case: Case) -> list[tuple[list[float], Gradients]]:
    """For each round the losses of its steps, and the gradients after it."""
    stages, mesh = copy.deepcopy(case.stages), rota.mesh(pp=case.plan.num_ranks, dp=case.dp)
    if case.wrap is not None:
        mine = case.plan.placement.stages_on(mesh.get_local_rank("pp"))
        stages = Stages([case.wrap(m, mesh) if s in mine else m for s, m in enumerate(stages.modules)], stages.edges)
    results = []
    with Pipeline(stages, case.plan, case.loss_fn, mesh=mesh, recompute=case.recompute) as pipeline:
        for batches in case.rounds:
            losses = []
            for i, batch in enumerate(batches):
                x, target = (tensor[pipeline.replica :: pipeline.num_replicas] for tensor in batch)
                evaluated = pipeline.evaluate(x, target)
                scale = scale_of(case, i, len(batches))
                losses.append(pipeline.step(x, target, scale=scale, sync=i == len(batches) - 1))
                assert losses[-1] == pytest.approx(evaluated, rel=1e-10)
            results.append((losses, gradients_of(pipeline.stages, pipeline.local_stages)))
            for parameter in pipeline.parameters() if case.clear else ():
                parameter.grad = None
    return results


def loss_and_count(case: Case, stages: Stages, batch: Batch) -> tuple[Tensor, Any]:
    """Of the whole batch, with the losses that its stages have added; a mean counts once."""
    with rota.collect_losses() as added:
        loss = case.loss_fn(stages.run(batch[0]), batch[1])
        return (loss + added.total, 1) if isinstance(loss, Tensor) else (loss[0] + added.weighted_total, loss[1])


def serial(case: Case) -> list[tuple[list[float], Gradients]]:
    """Each round by the unsplit model: its sums over the mean count of its steps."""
    stages, results = copy.deepcopy(case.stages), []
    for batches in case.rounds:
        made = [loss_and_count(case, stages, batch) for batch in batches]
        total = sum((loss * scale_of(case, i, len(made)) for i, (loss, _) in enumerate(made)), torch.tensor(0.0))
        (total / (sum(count for _, count in made) / len(made))).backward()
        results.append(([(loss / count).item() for loss, count in made], gradients_of(stages, range(len(stages)))))
        for module in stages.modules if case.clear else ():
            module.zero_grad()
    return results


def assert_exact(pool: Pool, cases: dict[str, Case]) -> None:
    """All cases are for the same number of processes."""
    first = next(iter(cases.values()))
    by_rank = pool.run(first.plan.num_ranks * first.dp, on_each, steps_on, [(case,) for case in cases.values()])
    for i, (name, case) in enumerate(cases.items()):
        for step, (losses, gradients) in enumerate(serial(case)):
            found = set()
            for results in by_rank:
                torch.testing.assert_close(results[i][step][0], losses, rtol=1e-10, atol=1e-10, msg=name)
                for (stage, parameter), gradient in results[i][step][1].items():
                    key = stage % len(case.stages), parameter
                    found.add(key)
                    torch.testing.assert_close(gradient, gradients[key], rtol=1e-10, atol=1e-10)
            assert found == gradients.keys(), name
