"""Jobs that compare a pipeline with the unsplit model on the same device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import rota
from rota import Pipeline, Plan, Stages
from rota.schedules import NAMED
from support.device_orders import OF_ANY_MODEL
from support.gpu.models import (
    DTYPES,
    Gradients,
    batch_of,
    blocks,
    clear,
    pipeline_on,
    plan_of,
    plans,
    trains,
    unsplit_step,
    worst,
)
from support.networks import gradients_of, loss_fn

NUM_STEPS = 2


def named(schedule: str, num_ranks: int) -> Plan:
    plan = plan_of(NAMED[schedule], num_ranks)
    assert plan is not None
    return plan


def nothing(_: Stages) -> None:
    pass


def compared(
    device: torch.device,
    plan: Plan,
    make: Callable[[], Stages],
    dtype: torch.dtype,
    *,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    change: Callable[[Stages], Any] = nothing,
    **sizes: int,
) -> float:
    """The largest relative difference of losses and of this rank's gradients, over some steps.

    `change` is done to the stages of the pipeline alone, after they have been moved.
    """
    whole, found = make().to(device), 0.0
    with pipeline_on(device, make(), plan) as pipeline:
        change(pipeline.stages)
        for seed in range(NUM_STEPS):
            batch = batch_of(plan.num_microbatches, device, seed, dtype, **sizes)
            for parameter in pipeline.parameters():
                parameter.grad = None
            clear(whole)
            with context():
                loss = pipeline.step(*batch)
                expected = unsplit_step(whole, batch, plan.num_microbatches)
            if not trains(plan):
                continue
            found = max(found, abs(loss - expected) / abs(expected), worst(local_gradients(pipeline), all_of(whole)))
    return found


def local_gradients(pipeline: Pipeline) -> Gradients:
    """By stage of the model, also where the plan has each stage twice; every trained parameter has one."""
    num_stages = pipeline.plan.num_stages
    found = gradients_of(pipeline.stages, pipeline.local_stages)
    assert len(found) == sum(len([*module.parameters()]) for module in pipeline.local_stages.values())
    return {(stage % num_stages, name.removeprefix("_orig_mod.")): g for (stage, name), g in found.items()}


def all_of(stages: Stages) -> Gradients:
    return gradients_of(stages, range(len(stages)))


def parameters_of(pipeline: Pipeline, whole: Stages) -> list[dict[tuple[int, str], nn.Parameter]]:
    """By stage and name, of this rank and of the unsplit model."""
    return [
        {(stage, name.removeprefix("module.")): p for stage, module in of for name, p in module.named_parameters()}
        for of in (pipeline.local_stages.items(), enumerate(whole.modules))
    ]


def worst_weight(pipeline: Pipeline, whole: Stages) -> float:
    """The largest relative difference of this rank's weights."""
    weights, expected = (
        {key: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for key, p in of.items()}
        for of in parameters_of(pipeline, whole)
    )
    return worst(weights, expected)


# --- schedules --------------------------------------------------------------------------------------------------------


def families(
    rank: int, device: torch.device, num_ranks: int, dtype: str, only: list[str] | None = None
) -> dict[str, float]:
    """For each family, or those in `only`, the largest relative difference."""
    kind = DTYPES[dtype]
    wanted = OF_ANY_MODEL if only is None else [NAMED[name] for name in only]
    return {
        name: compared(device, plan, lambda n=plan.num_stages: blocks(n, kind), kind)  # type: ignore[misc]
        for name, plan in plans(num_ranks, wanted).items()
    }


# --- weights in several places ----------------------------------------------------------------------------------------


def tied(num_stages: int) -> Stages:
    """The first stage and the last have one matrix, and another one is in all."""
    stages = blocks(num_stages, torch.float64)
    for stage in range(1, num_stages):
        stages[stage].norm.weight = stages[0].norm.weight  # type: ignore[union-attr]
    stages[-1 % num_stages].layers[0].weight = stages[0].layers[0].weight  # type: ignore[union-attr, index]
    return stages


# --- precision --------------------------------------------------------------------------------------------------------


def autocast(rank: int, device: torch.device, num_ranks: int, dtype: str) -> float:
    """Under autocast on both sides, of the same type."""
    plan, kind = named("zb_h1", num_ranks), getattr(torch, dtype)
    context = lambda: torch.autocast(device.type, kind)  # noqa: E731
    return compared(device, plan, lambda: blocks(plan.num_stages), torch.float32, context=context)


# --- recomputation, compiled stages, steps that overlap ---------------------------------------------------------------


def compiled(rank: int, device: torch.device, num_ranks: int, backend: str) -> float:
    """Stages of `torch.compile`, whole backwards and split ones."""
    torch._dynamo.reset()

    def change(stages: Stages) -> None:
        for module in stages.modules:
            module.compile(backend=backend)

    plans_of = [named(schedule, num_ranks) for schedule in ("1f1b", "zb_h1")]
    return max(
        compared(device, plan, lambda n=plan.num_stages: blocks(n), torch.float32, change=change)  # type: ignore[misc]
        for plan in plans_of
    )


# --- checkpoints ------------------------------------------------------------------------------------------------------


def resumed(rank: int, device: torch.device, num_ranks: int, folder: str, asynchronous: bool) -> tuple[float, float]:
    """How far loss and weights' sum are from those of an undisturbed training, after going on from a checkpoint."""
    found: list[tuple[float, float]] = []
    for number, (schedule, stops_at) in enumerate((("1f1b", 4), ("1f1b", 2), ("zb_h1", 4))):
        plan = named(schedule, num_ranks)
        stages = blocks(plan.num_stages, torch.float64, dropout=0.2)
        if number == 2:
            with torch.no_grad():
                for _, parameter in stages.named_parameters():
                    parameter.zero_()
        torch.manual_seed(5 + (number == 2))  # the checkpoint has the state of the generators
        with pipeline_on(device, stages, plan) as pipeline:
            optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
            checkpoints = rota.Checkpoints(Path(folder), pipeline, optimizer, asynchronous=asynchronous)
            first = 0
            if number == 2:
                loaded = checkpoints.load()
                assert loaded is not None, rank
                first = loaded.step
            for step in range(first, stops_at):
                loss = pipeline.step(*batch_of(plan.num_microbatches, device, step, torch.float64))
                optimizer.step()
                optimizer.zero_grad()
            if number == 1:
                checkpoints.save(stops_at)
            found.append((loss, sum(float(p.detach().double().sum()) for p in pipeline.parameters())))
    return abs(found[2][0] - found[0][0]), abs(found[2][1] - found[0][1])


# --- wrapped stages ---------------------------------------------------------------------------------------------------


@contextmanager
def float64_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def wrapped(rank: int, device: torch.device, pp: int, dp: int, how: str, schedule: str) -> float:
    """Stages in FSDP2: the largest difference of weights after some steps of SGD.

    The default process group must take tensors of the device.
    """
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dp, pp, 1), mesh_dim_names=("dp", "pp", "tp"))
    plan = named(schedule, pp)

    def wrap(module: nn.Module) -> nn.Module:
        for layer in module.layers if how == "fsdp by layer" else ():  # type: ignore[union-attr]
            if [*layer.parameters()]:
                fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=True)
        return fully_shard(module, mesh=mesh["dp"])

    with float64_by_default():
        whole, plain = (blocks(plan.num_stages, torch.float64) for _ in range(2))
        local = rota.local_stages(plan, mesh)
        plain.to(device, local)
        stages = Stages([wrap(m) if s in local else m for s, m in enumerate(plain.modules)])
        whole.to(device)
        with Pipeline(stages, plan, loss_fn, mesh=mesh) as pipeline:
            optimizers = [torch.optim.SGD([*of.values()], lr=0.1) for of in parameters_of(pipeline, whole)]
            for seed in range(3):
                batch = batch_of(dp * plan.num_microbatches, device, seed, torch.float64)
                pipeline.step(*(part.chunk(dp)[pipeline.replica] for part in batch))
                unsplit_step(whole, batch, dp * plan.num_microbatches)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            del rank
            return worst_weight(pipeline, whole)


# --- messages ---------------------------------------------------------------------------------------------------------


class Scale(nn.Module):
    """As many weights as numbers in a row: the message is a row."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.cos()


def messages(rank: int, device: torch.device, sizes: list[int]) -> dict[str, float]:
    """By bytes of a message: the largest difference of gradients. Two ranks exchange messages in both directions."""
    found = {}
    for num_bytes in sizes:
        plan, size = named("1f1b", 2), num_bytes // 4
        make = lambda n=size: Stages([Scale(n) for _ in range(2)])  # noqa: E731
        found[str(num_bytes)] = compared(device, plan, make, torch.float32, rows=1, width=size)
    return found
