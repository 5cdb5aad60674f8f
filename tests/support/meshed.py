"""Training on a mesh, in any precision, and the same by the unsplit model."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import rota
from rota import Cluster, Costs, Op, Pipeline, Plan, Stages, interleaved, place, spmd
from rota.schedules import NAMED
from support.networks import ROWS, batch_of, loss_fn
from support.parallel_modules import own_part
from support.pool import Pool

NUM_MICROBATCHES, NUM_ROUNDS, ACCUMULATE, MAX_NORM, BROKEN = 4, 6, 2, 0.3, 3

LATE_W = "zb, a forward between I and W"

Make = Callable[["Case", spmd.Group], Stages]


class Trained(NamedTuple):
    """What a process, or the unsplit model, has after training: of all steps and rounds, and its parameters."""

    losses: list[float]
    norms: list[float]
    scales: list[float]
    parameters: dict[tuple[int, str], Tensor]


class Case(NamedTuple):
    """How to train; in round BROKEN of float16, gradients of the first stage of the last replica are infinite.

    `wrap(stage module, mesh)` gives the module that is trained.
    """

    schedule: str
    pp: int
    dp: int
    wrap: Callable[[nn.Module, DeviceMesh], nn.Module] | None = None
    recomputed: bool = False  # by R
    dtype: torch.dtype = torch.float64  # of autocast; float64: without
    recompute: str = "none"
    compiled: bool = False
    tp: int = 1
    tied: bool = False  # of stages in parts

    @property
    def stored_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def autocast(self) -> torch.autocast:
        low = self.dtype != torch.float64
        return torch.autocast("cpu", self.dtype if low else torch.bfloat16, enabled=low)

    def scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=self.dtype == torch.float16)


def sharded(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(module, mesh=mesh["dp"])


def plan_of(case: Case, num_microbatches: int = NUM_MICROBATCHES) -> Plan:
    if case.schedule.startswith("interleaved"):
        return NAMED[case.schedule](
            interleaved(costs_for(case, 2 * case.pp), Cluster.uniform(case.pp)), num_microbatches
        )
    if case.schedule == LATE_W:
        orders = ("0F0 0F1 0F2 0F3 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3", "1F0 1I0 1F1 1W0 1I1 1F2 1W1 1I2 1F3 1W2 1I3 1W3")
        placement = place(costs_for(case, 2), Cluster.uniform(2))
        return Plan(placement, 4, tuple(tuple(map(Op.parse, order.split())) for order in orders))
    return NAMED[case.schedule](place(costs_for(case, case.pp), Cluster.uniform(case.pp)), num_microbatches)


def costs_for(case: Case, num_stages: int) -> Costs:
    recompute = {"recompute_us": 1} if case.recomputed else {}
    return Costs.uniform(num_stages, 1, 1, weight_us=1 if "z" in case.schedule else None, **recompute)


def global_batches(case: Case) -> list[Any]:
    """For all replicas together."""
    batches = [batch_of(case.dp * NUM_MICROBATCHES, seed) for seed in range(NUM_ROUNDS * ACCUMULATE)]
    return [tuple(tensor.to(case.stored_dtype) for tensor in batch) for batch in batches]


def part_of(batch: tuple[Tensor, Tensor], pipeline: Pipeline) -> tuple[Tensor, Tensor]:
    """This replica's part of a global batch."""
    x, target = (tensor.chunk(pipeline.num_replicas)[pipeline.replica] for tensor in batch)
    return x, target


def break_gradients(stages: Stages, the_round: list[int], case: Case) -> None:
    def of_output(_: nn.Module, __: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda g: torch.full_like(g, torch.inf) if the_round[0] == BROKEN else g)

    if case.dtype == torch.float16:
        stages[0].register_forward_hook(of_output)


def wrapped(stages: Stages, mesh: Any, case: Case) -> Stages:
    """Each stage of this rank wrapped; or replicas that begin with other weights than the first one, which count."""
    if case.wrap is not None:
        mine = plan_of(case).placement.stages_on(mesh.get_local_rank("pp"))
        return Stages([case.wrap(m, mesh) if s in mine else m for s, m in enumerate(stages.modules)], stages.edges)
    with torch.no_grad():
        for _, parameter in stages.named_parameters() if mesh.get_local_rank("dp") else ():
            parameter.add_(1)
    return stages


def train_on_mesh(rank: int, make: Make, case: Case) -> Trained:
    """Rounds of SGD with clipping and accumulation, and a scaler for float16."""
    mesh, the_round, scaler = rota.mesh(pp=case.pp, dp=case.dp, tp=case.tp), [0], case.scaler()
    stages = make(case, mesh.get_group("tp") if case.tp > 1 else None)
    if mesh.get_local_rank("dp") == case.dp - 1 and mesh.get_local_rank("tp") == 0:
        break_gradients(stages, the_round, case)
    stages = wrapped(stages, mesh, case)
    trained, batches = Trained([], [], [], {}), iter(global_batches(case))
    with Pipeline(stages, plan_of(case), loss_fn, mesh=mesh, recompute=case.recompute) as pipeline:
        parameters = [*pipeline.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.2, momentum=0.5) if parameters else None
        for the_round[0] in range(NUM_ROUNDS):
            for i in range(ACCUMULATE):
                mine, sync = part_of(next(batches), pipeline), i == ACCUMULATE - 1
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
                whole = p.full_tensor() if hasattr(p, "full_tensor") else p
                trained.parameters[stage, name.removeprefix("module.")] = whole.detach().clone()
    return trained


def train_serially(make: Make, case: Case) -> Trained:
    """Not compiled, nothing recomputed; the gradients of replicas are divided when they are together, as DDP does."""
    the_round, scaler = [0], case.scaler()
    stages = make(case._replace(compiled=False), None)
    break_gradients(stages, the_round, case)
    trained, batches = Trained([], [], [], {}), iter(global_batches(case))
    parameters = [p for _, p in stages.named_parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.2, momentum=0.5)
    for the_round[0] in range(NUM_ROUNDS):
        for _ in range(ACCUMULATE):
            losses = []
            for x, y in zip(*(part.split(ROWS) for part in next(batches)), strict=True):
                with case.autocast():
                    losses.append(loss_fn(stages.run(x), y))
                scaler.scale(losses[-1] / (ACCUMULATE * NUM_MICROBATCHES)).backward()
            trained.losses.append(sum(loss.item() for loss in losses) / len(losses))
        for parameter in parameters:
            parameter.grad /= case.dp
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


def assert_trains_as_unsplit(pool: Pool, make: Make, cases: Sequence[Case]) -> None:
    """Every process has the serial losses, norms and scales; all parameters are somewhere, and equal where they are."""
    num_processes = cases[0].pp * cases[0].dp * cases[0].tp
    by_process = pool.run(num_processes, on_each, train_on_mesh, [(make, case) for case in cases])
    for i, case in enumerate(cases):
        serial = train_serially(make, case)
        # Micro-batches of the same rows are rounded alike, as long as no sum is made in parts.
        close = 1e-10 if case.dtype == torch.float64 else 1e-5 if case.tp == 1 else 1e-2
        tolerance = {"rtol": close, "atol": close, "equal_nan": True}
        if case.dtype == torch.float16:
            assert serial.scales[BROKEN] == serial.scales[BROKEN - 1] / 2
            assert serial.scales[1] == 2 * serial.scales[0]
        for process, found in enumerate(results[i] for results in by_process):
            torch.testing.assert_close(found.losses, serial.losses, **tolerance)
            torch.testing.assert_close(found.norms, serial.norms, **tolerance)
            assert found.scales == serial.scales
            for key, parameter in found.parameters.items():
                expected = own_part(serial.parameters[key], parameter, process % case.tp)
                torch.testing.assert_close(parameter, expected, **tolerance)
        assert {key for results in by_process for key in results[i].parameters} == serial.parameters.keys()


def on_each(rank: int, function: Callable[..., Any], cases: list[tuple[Any, ...]]) -> list[Any]:
    """Several cases in one job of the pool."""
    return [function(rank, *arguments) for arguments in cases]
