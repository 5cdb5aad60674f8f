"""Autocast, gradient scalers, recomputation and compiled stages train as the unsplit model does, on any mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import rota
from rota import Cluster, Costs, Pipeline, Plan, Stages, place, spmd
from rota.schedules import NAMED
from runtime.reducing.test_wrapped_stages import in_ddp, sharded
from support.meshed import on_each, part_of
from support.networks import ROWS, batch_of, chain, loss_fn
from support.parallel_modules import GatheredLayer, ParallelLayer, own_part
from support.pool import Pool
from support.sampling import IS_WHOLE

pytestmark = pytest.mark.dist

NUM_MICROBATCHES, NUM_ROUNDS, ACCUMULATE, MAX_NORM, BROKEN = 2, 6, 2, 0.3, 3


class Case(NamedTuple):
    """How to train; in round BROKEN of float16, gradients of one stage of the last replica are infinite."""

    schedule: str
    dtype: torch.dtype  # of autocast; float64: without
    recompute: str = "none"
    compiled: bool = False
    tied: bool = False  # of stages in parts
    wrap: Callable[[nn.Module, DeviceMesh], nn.Module] | None = None

    def autocast(self) -> torch.autocast:
        low = self.dtype != torch.float64
        return torch.autocast("cpu", self.dtype if low else torch.bfloat16, enabled=low)

    def scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=self.dtype == torch.float16)


CASES = [
    Case("1f1b", torch.float16),
    Case("zb_h1", torch.float16, recompute="full"),
    Case("zb_h1", torch.bfloat16),
    Case("zb_h1", torch.bfloat16, compiled=True),
    Case("1f1b", torch.float64, recompute="full"),
    Case("zb_h1", torch.float64, recompute="full", compiled=True),
]


PARTS = [Case("zb_h1", torch.float64, tied=True), Case("zb_h1", torch.float64, wrap=sharded)]


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]
    scales: list[float]
    parameters: dict[tuple[int, str], Tensor]


def make_stages(pp: int, group: spmd.Group, has_parts: bool, case: Case) -> Stages:
    """A chain, whose last stage has no weights where there are three; or stages in parts."""
    if has_parts:
        first, last = ParallelLayer(0, group), ParallelLayer(2, group)
        last.down = first.down if case.tied else last.down
        stages = Stages([first, nn.Sequential(GatheredLayer(1, group), last)])
    else:
        stages = Stages([*chain(pp).modules[: 2 if pp == 3 else pp], *[nn.Tanh()] * (pp == 3)])
    for module in stages.modules:
        module.to(torch.float64 if case.dtype == torch.float64 else torch.float32)
        if case.compiled:
            module.compile(backend="aot_eager")
    return stages


def break_gradients(stages: Stages, the_round: list[int], case: Case) -> None:
    def of_output(_: nn.Module, __: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda g: torch.full_like(g, torch.inf) if the_round[0] == BROKEN else g)

    if case.dtype == torch.float16:
        stages[0].register_forward_hook(of_output)


def batches(case: Case, num_replicas: int) -> list[Any]:
    dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    shapes = num_replicas * NUM_MICROBATCHES
    return [tuple(t.to(dtype) for t in batch_of(shapes, seed)) for seed in range(NUM_ROUNDS * ACCUMULATE)]


def plan_for(case: Case, pp: int) -> Plan:
    costs = Costs.uniform(pp, weight_us=1 if case.schedule.startswith("zb") else None)
    return NAMED[case.schedule](place(costs, Cluster.uniform(pp)), NUM_MICROBATCHES)


def train_on_mesh(rank: int, pp: int, dp: int, tp: int, case: Case) -> Trained:
    mesh, the_round, scaler = rota.mesh(pp=pp, dp=dp, tp=tp), [0], case.scaler()
    stages = make_stages(pp, mesh.get_group("tp") if tp > 1 else None, tp > 1, case)
    if mesh.get_local_rank("dp") == dp - 1 and mesh.get_local_rank("tp") == 0:
        break_gradients(stages, the_round, case)
    if mesh.get_local_rank("dp") and case.wrap is None:
        with torch.no_grad():  # the first process's weights count
            for p in nn.ModuleList(stages.modules).parameters():
                p.add_(1)
    if case.wrap is not None:
        mine = plan_for(case, pp).placement.stages_on(mesh.get_local_rank("pp"))
        stages = Stages([case.wrap(m, mesh) if s in mine else m for s, m in enumerate(stages.modules)])
    trained, given = Trained([], [], [], {}), iter(batches(case, dp))
    with Pipeline(stages, plan_for(case, pp), loss_fn, mesh=mesh, recompute=case.recompute) as pipeline:
        parameters = [*pipeline.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.2, momentum=0.5) if parameters else None
        for the_round[0] in range(NUM_ROUNDS):
            for i in range(ACCUMULATE):
                mine, sync = part_of(next(given), pipeline), i == ACCUMULATE - 1
                with case.autocast():
                    loss = pipeline.step(*mine, scale=1 / ACCUMULATE, sync=sync, scaler=scaler)
                trained.losses.append(loss)
            if optimizer:
                scaler.unscale_(optimizer)
            trained.norms.append(finite_or_nan(pipeline.clip_grad_norm_(MAX_NORM).item()))
            if optimizer:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            trained.scales.append(scaler.get_scale())
        for stage, module in pipeline.local_stages.items():
            for name, p in module.named_parameters():
                whole = p.full_tensor() if isinstance(p, DTensor) else p
                trained.parameters[stage, name] = whole.detach().clone()
    return trained


def train_serially(pp: int, dp: int, has_parts: bool, case: Case) -> Trained:
    """Not compiled, nothing recomputed; the gradients of replicas are divided when they are together, as DDP does."""
    the_round, scaler = [0], case.scaler()
    stages = make_stages(pp, None, has_parts, case._replace(compiled=False))
    break_gradients(stages, the_round, case)
    trained, given = Trained([], [], [], {}), iter(batches(case, dp))
    parameters = [p for _, p in stages.named_parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.2, momentum=0.5)
    for the_round[0] in range(NUM_ROUNDS):
        for _ in range(ACCUMULATE):
            losses = []
            for x, y in zip(*(part.split(ROWS) for part in next(given)), strict=True):
                with case.autocast():
                    losses.append(loss_fn(stages.run(x), y))
                scaler.scale(losses[-1] / (ACCUMULATE * NUM_MICROBATCHES)).backward()
            trained.losses.append(sum(loss.item() for loss in losses) / len(losses))
        for parameter in parameters:
            parameter.grad /= dp
        scaler.unscale_(optimizer)
        trained.norms.append(finite_or_nan(nn.utils.clip_grad_norm_(parameters, MAX_NORM).item()))
        scaler.step(optimizer)
        optimizer.zero_grad()
        scaler.update()
        trained.scales.append(scaler.get_scale())
    named = {(s, name): p.detach() for s, m in enumerate(stages.modules) for name, p in m.named_parameters()}
    trained.parameters.update(named)
    return trained


def finite_or_nan(norm: float) -> float:
    """An infinite gradient may make others nan: which of the two a norm is says nothing."""
    return norm if math.isfinite(norm) else math.nan


def compare(pool: Pool, pp: int, dp: int, tp: int, cases: list[Case]) -> None:
    by_process = pool.run(pp * dp * tp, on_each, train_on_mesh, [(pp, dp, tp, case) for case in cases])
    for i, case in enumerate(cases):
        serial = train_serially(pp, dp, tp > 1, case)
        # Micro-batches of the same rows are rounded alike, as long as no sum is made in parts.
        close = 1e-10 if case.dtype == torch.float64 else 1e-5 if tp == 1 else 1e-2
        tolerance = {"rtol": close, "atol": close, "equal_nan": True}
        if case.dtype == torch.float16:
            assert serial.scales[BROKEN] == serial.scales[BROKEN - 1] / 2
            assert serial.scales[1] == 2 * serial.scales[0]
        for process, found in enumerate(results[i] for results in by_process):
            torch.testing.assert_close(found.losses, serial.losses, **tolerance)
            torch.testing.assert_close(found.norms, serial.norms, **tolerance)
            assert found.scales == serial.scales
            for key, parameter in found.parameters.items():
                expected = own_part(serial.parameters[key], parameter, process % tp)
                torch.testing.assert_close(parameter, expected, **tolerance)
        assert {key for results in by_process for key in results[i].parameters} == serial.parameters.keys()


@pytest.mark.parametrize(
    ("pp", "dp"),
    [(1, 2), (3, 1), *(pytest.param(*sizes, marks=pytest.mark.sweep) for sizes in [(1, 1), (2, 1), (2, 2), (3, 2)])],
)
def test_pipelines_and_replicas(pool: Pool, pp: int, dp: int) -> None:
    compare(pool, pp, dp, 1, CASES)


@pytest.mark.parametrize(
    "cases",
    [CASES[1:3] + PARTS, pytest.param([case for case in CASES if not case.compiled], marks=pytest.mark.sweep)],
    ids=["core", "all"],
)
def test_pipeline_and_tensor_and_replicas(pool: Pool, cases: list[Case]) -> None:
    pool.renew()
    compare(pool, 2, 2, 2, cases)


@pytest.mark.parametrize("wrap", [in_ddp, sharded])
def test_wrapped_stages(pool: Pool, wrap: Any) -> None:
    cases = [Case("1f1b", torch.float16, wrap=wrap), Case("zb_h1", torch.float64, "full", wrap=wrap)]
    if IS_WHOLE:
        cases += [Case("zb_h1", torch.bfloat16, wrap=wrap), Case("1f1b", torch.float64, "full", wrap=wrap)]
    pool.renew()
    compare(pool, 2, 2, 1, cases)
