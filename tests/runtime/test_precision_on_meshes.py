"""Autocast, gradient scalers, recomputation and compiled stages train as the unsplit model does, on any mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rota import Stages, spmd
from support.meshed import Case, assert_trains_as_unsplit, in_ddp, plan_of, sharded
from support.networks import chain
from support.parallel_modules import GatheredLayer, ParallelLayer
from support.pool import Pool
from support.sampling import IS_WHOLE

pytestmark = pytest.mark.dist


def cases_on(pp: int, dp: int) -> list[Case]:
    return [
        Case("1f1b", pp, dp, dtype=torch.float16),
        Case("zb_h1", pp, dp, dtype=torch.float16, recompute="full"),
        Case("zb_h1", pp, dp, dtype=torch.bfloat16),
        Case("zb_h1", pp, dp, dtype=torch.bfloat16, compiled=True),
        Case("1f1b", pp, dp, recompute="full"),
        Case("zb_h1", pp, dp),
        Case("zb_h1", pp, dp, recompute="full", compiled=True),
        Case("interleaved_1f1b", pp, dp),
    ]


def make_stages(case: Case, group: spmd.Group) -> Stages:
    """A chain, whose last stage has no weights where there are three; or stages in parts."""
    num_stages = plan_of(case).num_stages
    if case.tp > 1:
        first, last = ParallelLayer(0, group), ParallelLayer(2, group)
        last.down = first.down if case.tied else last.down
        stages = Stages([first, nn.Sequential(GatheredLayer(1, group), last)])
    else:
        layers = [*chain(num_stages).modules]
        stages = Stages([*layers[:2], nn.Tanh()] if num_stages == 3 else layers)
    for module in stages.modules:
        module.to(case.stored_dtype)
        if case.compiled:
            module.compile(backend="aot_eager")
    return stages


@pytest.mark.parametrize(
    ("pp", "dp"),
    [(2, 2), (3, 1), *(pytest.param(*sizes, marks=pytest.mark.sweep) for sizes in [(1, 1), (1, 2), (2, 1), (3, 2)])],
)
def test_pipelines_and_replicas(pool: Pool, pp: int, dp: int) -> None:
    assert_trains_as_unsplit(pool, make_stages, cases_on(pp, dp))


IN_PARTS = [case._replace(tp=2) for case in cases_on(2, 2) if case.schedule != "interleaved_1f1b"]
TIED_OR_SHARDED = [Case("zb_h1", 2, 2, tp=2, tied=True), Case("zb_h1", 2, 2, sharded, tp=2)]


@pytest.mark.parametrize(
    "cases",
    [
        IN_PARTS[1:3] + TIED_OR_SHARDED,
        pytest.param([case for case in IN_PARTS if not case.compiled], marks=pytest.mark.sweep),
    ],
    ids=["core", "all"],
)
def test_pipeline_and_tensor_and_replicas(pool: Pool, cases: list[Case]) -> None:
    pool.renew()
    assert_trains_as_unsplit(pool, make_stages, cases)


@pytest.mark.parametrize("wrap", [in_ddp, sharded])
def test_wrapped_stages(pool: Pool, wrap: Any) -> None:
    cases = [Case("1f1b", 2, 2, wrap, dtype=torch.float16), Case("zb_h1", 2, 2, wrap, recompute="full")]
    if IS_WHOLE:
        cases += [Case("zb_h1", 2, 2, wrap, dtype=torch.bfloat16), Case("1f1b", 2, 2, wrap, recompute="full")]
    pool.renew()
    assert_trains_as_unsplit(pool, make_stages, cases)
