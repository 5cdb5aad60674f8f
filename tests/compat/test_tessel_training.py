"""Schedules that Tessel's composer made run, with modules for their blocks, and give the unsplit model's gradients."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from rota import Pipeline, Plan, Stages, spmd
from rota.compat.tessel.cases import PLACEMENTS
from rota.compat.tessel.schedule.composer import Composer
from support.networks import batch_of, loss_fn
from support.parallel_modules import ParallelLayer
from support.pool import Pool

pytestmark = pytest.mark.dist

NMICROS = 3
FROZEN = {"finetune": (0,), "alphafold": (0, 1, 2, 3)}


@cache
def plan_of(shape: str, nmicros: int, train: bool = True) -> Plan:
    """On two devices; with two more micro-batches than were composed."""
    schedule = Composer.compose_n(PLACEMENTS[shape](2, train=train), 4 if train else None, nmicros)
    assert schedule is not None
    return schedule.unroll(nmicros + 2).to_plan(4 if train else None)


def stages_for(shape: str, plan: Plan, parallel: bool) -> Stages:
    """A module for each forward block; of X one chain alone."""
    placement = plan.placement
    on = [placement.ranks_of(stage) for stage in placement.stages[: placement.num_stages // placement.num_components]]
    groups = {ranks: spmd.group(ranks) if parallel else None for ranks in dict.fromkeys(on)}
    modules = [ParallelLayer(stage, groups[ranks]) for stage, ranks in enumerate(on)]
    for stage in FROZEN.get(shape, ()):
        modules[stage].requires_grad_(False)
    return Stages(modules, [edge for edge in placement.stage_edges if max(edge) < len(on)])


def whole(name: str, gradient: Tensor, group: spmd.Group) -> Tensor:
    """Of a layer that is dealt to ranks."""
    dims = {"up": 0, "up_bias": 0, "down": 1}
    return spmd.gather_from_ranks(gradient, group, dims[name]) if group and name in dims else gradient


def train(rank: int, plans: dict[str, Plan], batches: dict[str, Any]) -> dict[str, Any]:
    """Losses, and gradients by (stage, parameter name)."""
    found: dict[str, Any] = {}
    for shape, plan in plans.items():
        stages = stages_for(shape, plan, parallel=True)
        with Pipeline(stages, plan, loss_fn) as pipeline:
            loss = pipeline.step(*batches[shape])
            gradients = {
                (stage % len(stages), name): whole(name, parameter.grad, module.group)
                for stage, module in pipeline.local_stages.items()
                for name, parameter in module.named_parameters()
                if parameter.grad is not None
            }
            found[shape] = loss, gradients, pipeline.timeline().plan.orders == plan.orders
    return found


@pytest.fixture(scope="module")
def trained(pool: Pool) -> list[dict[str, Any]]:
    plans = {shape: plan_of(shape, NMICROS) for shape in PLACEMENTS}
    batches = {shape: batch_of(plan.num_microbatches) for shape, plan in plans.items()}
    return pool.run(2, train, plans, batches)


@pytest.mark.parametrize("shape", PLACEMENTS)
def test_gradients_are_the_unsplit_model_s(trained: list[dict[str, Any]], shape: str) -> None:
    plan = plan_of(shape, NMICROS)
    inputs, targets = batch_of(plan.num_microbatches)
    serial = stages_for(shape, plan, parallel=False)
    expected = loss_fn(serial.run(inputs), targets)
    expected.backward()
    seen: set[tuple[int, str]] = set()
    for by_shape in trained:
        loss, gradients, is_as_planned = by_shape[shape]
        assert loss == pytest.approx(expected.item(), rel=1e-10)
        assert is_as_planned
        for (stage, name), gradient in gradients.items():
            parameter = serial[stage].get_parameter(name)
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-10, atol=1e-10)
        seen |= gradients.keys()
    trainable = {
        (stage, name)
        for stage, module in enumerate(serial.modules)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    assert seen == trainable
