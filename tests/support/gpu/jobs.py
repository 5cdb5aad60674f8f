"""Jobs of the tests on accelerators: what a device does, and what only its own tensors show."""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rota
from rota import Cluster, Costs, Pipeline, Plan, Stages, place, simulate
from rota.runtime.device.protocol import is_queued
from rota.schedules import NAMED
from rota.torch_internals import backend_of
from support.networks import clear, gradients_of, loss_fn

ROWS, WIDTH = 6, 16
Named = Mapping[tuple[int, str], Tensor]  # by stage and name

# --- what they train --------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.layers(self.norm(x))
        return y


def blocks(num_stages: int, dtype: torch.dtype = torch.float32, width: int = WIDTH, **options: Any) -> Stages:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return Stages([Block(width, **options).to(dtype) for _ in range(num_stages)])


def named(schedule: str, num_ranks: int) -> Plan:
    """One stage per rank; on one rank four stages, one after another."""
    num_stages = 4 if num_ranks == 1 else num_ranks
    costs = Costs.uniform(num_stages, 10, 10, weight_us=7 if schedule == "zb_h1" else None)
    if num_ranks == 1:
        return NAMED["gpipe"](place(costs, Cluster.uniform(1), [0] * 4), 8)
    return NAMED[schedule](place(costs, Cluster.uniform(num_ranks)), 2 * num_ranks)


def batch_of(
    num_microbatches: int, device: torch.device, seed: int = 1, dtype: torch.dtype = torch.float32, **sizes: int
) -> tuple[Tensor, Tensor]:
    """Drawn on the CPU: the same on all ranks and devices."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, num_microbatches * sizes.get("rows", ROWS), sizes.get("width", WIDTH))
    x, target = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).unbind()
    return x.to(device), target.to(device)


def pipeline_on(device: torch.device, stages: Stages, plan: Plan, **options: Any) -> Pipeline:
    """A pipeline whose own stages are on `device`."""
    stages.to(device, rota.local_stages(plan, options.get("mesh")))
    return Pipeline(stages, plan, loss_fn, **options)


# --- compared with the unsplit model on the same device ---------------------------------------------------------------


def unsplit_step(stages: Stages, batch: tuple[Tensor, Tensor], num_microbatches: int) -> float:
    """The unsplit model, micro-batch by micro-batch; gradients are added to `.grad`."""
    total = 0.0
    for x, target in zip(*(part.chunk(num_microbatches) for part in batch), strict=True):
        loss = loss_fn(stages.run(x), target) / num_microbatches
        loss.backward()
        total += loss.item()
    return total


def worst(found: Named, expected: Named) -> float:
    """The largest difference, relative to the largest number of the tensor that it is in.

    A tensor of nearly nothing counts as a thousandth of the largest of all.
    """
    sizes = {key: float(tensor.abs().max()) for key, tensor in expected.items()}
    floor = max(sizes.values()) / 1000
    return max(float((found[key] - expected[key]).abs().max()) / max(sizes[key], floor) for key in found)


def compared(
    device: torch.device,
    plan: Plan,
    make: Callable[[], Stages],
    *,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    backend: str = "",
    **sizes: int,
) -> float:
    """The largest relative difference of losses and of this rank's gradients, over two steps in float32.

    `backend`: of torch.compile, for the stages of the pipeline alone.
    """
    whole, found = make().to(device), 0.0
    with pipeline_on(device, make(), plan) as pipeline:
        for module in pipeline.stages.modules if backend else ():
            module.compile(backend=backend)
        for seed in range(2):
            batch = batch_of(plan.num_microbatches, device, seed, **sizes)
            clear(pipeline)
            clear(whole)
            with context():
                loss = pipeline.step(*batch)
                expected = unsplit_step(whole, batch, plan.num_microbatches)
            own = gradients_of(pipeline.stages, pipeline.local_stages)
            assert len(own) == len([*pipeline.parameters()])
            gradients = gradients_of(whole, range(len(whole)))
            found = max(found, abs(loss - expected) / abs(expected), worst(own, gradients))
    return found


def autocast(rank: int, device: torch.device, num_ranks: int, dtype: str) -> float:
    """Under autocast on both sides, of the same type."""
    plan, kind = named("zb_h1", num_ranks), getattr(torch, dtype)
    return compared(device, plan, lambda: blocks(plan.num_stages), context=lambda: torch.autocast(device.type, kind))


def compiled(rank: int, device: torch.device, num_ranks: int, backend: str) -> float:
    """Stages of `torch.compile`, with split backwards."""
    torch._dynamo.reset()
    plan = named("zb_h1", num_ranks)
    return compared(device, plan, lambda: blocks(plan.num_stages), backend=backend)


class Scale(nn.Module):
    """As many weights as numbers in a row: the message is a row."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.cos()


def messages(rank: int, device: torch.device, sizes: list[int]) -> float:
    """The largest difference of gradients, where two ranks exchange messages of these bytes in both directions."""
    plan = named("1f1b", 2)
    return max(
        compared(device, plan, lambda n=size // 4: Stages([Scale(n), Scale(n)]), rows=1, width=size // 4)  # type: ignore[misc]
        for size in sizes
    )


def wrapped(rank: int, device: torch.device, pp: int, dp: int, schedule: str) -> float:
    """Stages in FSDP2: the largest difference of weights after some steps of SGD.

    The default process group must take tensors of the device.
    """
    mesh = init_device_mesh(device.type, (dp, pp, 1), mesh_dim_names=("dp", "pp", "tp"))
    plan = named(schedule, pp)
    whole, plain = (blocks(plan.num_stages, torch.float64) for _ in range(2))
    local = rota.local_stages(plan, mesh)
    plain.to(device, local)
    whole.to(device)
    stages = Stages([fully_shard(m, mesh=mesh["dp"]) if s in local else m for s, m in enumerate(plain.modules)])
    with Pipeline(stages, plan, loss_fn, mesh=mesh) as pipeline:
        optimizers = [torch.optim.SGD([p for _, p in of.named_parameters()], lr=0.1) for of in (pipeline, whole)]
        for seed in range(3):
            batch = batch_of(dp * plan.num_microbatches, device, seed, torch.float64)
            pipeline.step(*(part.chunk(dp)[pipeline.replica] for part in batch))
            unsplit_step(whole, batch, dp * plan.num_microbatches)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found: Any = {(s, name): p for s, m in pipeline.local_stages.items() for name, p in m.named_parameters()}
        expected = {(s, name): p.detach() for s, m in enumerate(whole.modules) for name, p in m.named_parameters()}
        return worst({key: weight.full_tensor().detach() for key, weight in found.items()}, expected)


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


# --- the host ---------------------------------------------------------------------------------------------------------


@contextmanager
def waits_are_errors(device: torch.device) -> Iterator[None]:
    """A host that waits for its device inside raises. PyTorch knows that of CUDA alone."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def a_wait_is_an_error(rank: int, device: torch.device) -> bool:
    """Whether `waits_are_errors` sees a wait at all."""
    number = torch.ones((), device=device)
    try:
        with waits_are_errors(device):
            number.item()
    except RuntimeError as error:
        return "synchroniz" in str(error)
    return False


def limits_of_kernels(rank: int, device: torch.device, num_ranks: int) -> list[tuple[int, int]]:
    """By group on the device: how many CTAs a kernel of NCCL may have, and how many Rota lets it have at most."""
    plan = named("1f1b", num_ranks)
    with pipeline_on(device, blocks(num_ranks), plan) as pipeline:
        processes = pipeline._engine.processes
        assert processes.most_ctas is not None
        options = [backend_of(group, device).options for group in processes._groups_on_device]
        return [(options.config.max_ctas, processes.most_ctas.everywhere) for options in options]


def tied(num_stages: int) -> Stages:
    """The first stage and the last have one matrix, and another one is in all."""
    stages = blocks(num_stages, torch.float64)
    for stage in range(1, num_stages):
        stages[stage].norm.weight = stages[0].norm.weight  # type: ignore[union-attr]
    stages[-1 % num_stages].layers[0].weight = stages[0].layers[0].weight  # type: ignore[union-attr, index]
    return stages


def steps_without_waits(rank: int, device: torch.device, num_ranks: int, kind: str) -> list[float]:
    """Losses of steps in which the host may not wait: all but the first, in which shapes are learned."""
    options: dict[str, Any] = {}
    plan = named("zb_h1" if kind == "split" else "1f1b", num_ranks)
    if kind == "replicas":
        plan = named("1f1b", num_ranks // 2)
        options["mesh"] = rota.mesh(pp=num_ranks // 2, dp=2)
    if kind == "recomputed":
        options["recompute"] = "full"
    dtype = torch.float64 if kind == "tied" else torch.float32
    stages = tied(plan.num_stages) if kind == "tied" else blocks(plan.num_stages)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**8) if kind == "scaler" else None
    begun: list[Any] = []
    with pipeline_on(device, stages, plan, **options) as pipeline:
        for seed in range(4):
            batch = batch_of(plan.num_microbatches, device, pipeline.replica + 2 * seed, dtype)
            if seed == 0:
                begun.append(pipeline.step(*batch, scaler=scaler))
            else:
                with waits_are_errors(device):
                    begun.append(pipeline.begin_step(*batch, scaler=scaler))
                    if scaler is None:
                        begun.append(pipeline.step(*batch))
                        pipeline.clip_grad_norm_(1.0)
            if scaler is not None:
                scaler.update()
            for parameter in pipeline.parameters():
                parameter.grad = None
        return [one if isinstance(one, float) else one.wait() for one in begun]


# --- memory -----------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Keeps its input and one large tensor."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return y


def peak_memory(rank: int, device: torch.device, num_ranks: int, schedule: str, rows: int) -> dict[str, int]:
    """The peak of a step as the plan has it, and as the device's allocator counts it, less what was there before.

    `slack_bytes`: what the two may differ by. Ops need some large tensors at a time that the plan does not count, and a
    few boundary tensors come or go a little earlier or later.
    """
    width, hidden, num_microbatches = 16, 256, 12
    boundary_bytes, hidden_bytes = 4 * rows * width, 4 * rows * hidden
    num_stages = max(num_ranks, 2)
    kept = tuple(hidden_bytes + boundary_bytes * (stage > 0) for stage in range(num_stages))
    costs = Costs.uniform(num_stages, 10, 20, boundary_bytes=boundary_bytes)
    costs = Costs(costs.forward_us, costs.backward_us, activation_bytes=kept, boundary_bytes=boundary_bytes)
    ranks = [min(stage, num_ranks - 1) for stage in range(num_stages)]
    plan: Plan = NAMED[schedule](place(costs, Cluster.uniform(num_ranks), ranks), num_microbatches)
    torch.manual_seed(0)
    stages = Stages([Wide(width, hidden) for _ in range(num_stages)])
    with pipeline_on(device, stages, plan) as pipeline:
        batch = batch_of(num_microbatches, device, rows=rows, width=width)
        for _ in range(2):
            pipeline.step(*batch)
        queue = pipeline._engine.here.device
        assert is_queued(queue)
        queue.synchronize()
        queue.reset_peak()
        before_bytes = queue.peak_bytes()  # parameters, their gradients, the batch
        pipeline.step(*batch)
        return {
            "planned_bytes": simulate(plan).peak_memory_bytes[pipeline.rank],
            "measured_bytes": queue.peak_bytes() - before_bytes,
            "slack_bytes": 4 * hidden_bytes + 6 * boundary_bytes,
        }


# --- times ------------------------------------------------------------------------------------------------------------


def event_clock(rank: int, device: torch.device, width: int, rows: int) -> dict[str, float]:
    """Of big stages on one device: times of the timeline, and those of the profiler for the same step, in µs."""
    plan = named("1f1b", 1)
    with pipeline_on(device, blocks(plan.num_stages, width=width), plan) as pipeline:
        batch = batch_of(plan.num_microbatches, device, rows=rows, width=width)
        for _ in range(3):
            pipeline.step(*batch)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        ) as profiler:
            pipeline.step(*batch)
            torch.accelerator.synchronize()
        timeline = pipeline.timeline()
    kernels = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.is_user_annotation
        and not event.name.startswith(("Memcpy", "Memset"))
    ]
    begun, ended = min((start for start, _ in kernels), default=0), max((end for _, end in kernels), default=0)
    starts, ends = timeline.starts_us[0], timeline.ends_us[0]
    return {
        "num_kernels": len(kernels),
        "kernels_us": sum(end - start for start, end in kernels),
        "ops_us": sum(ends) - sum(starts),
        "kernels_span_us": ended - begun,
        "ops_span_us": ends[-1] - starts[0],
    }


# --- the machine, and a rank that is lost -----------------------------------------------------------------------------


def machine(rank: int, device: torch.device) -> dict[str, Any]:
    """What a result is read with: hardware and versions."""
    found: dict[str, Any] = {"device_type": device.type, "torch": torch.__version__, "rota": rota.__version__}
    found |= {"python": platform.python_version(), "system": platform.platform()}
    if device.type == "cuda":
        found["devices"] = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        found |= {"cuda": torch.version.cuda, "hip": torch.version.hip}
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


TIMEOUT_S = 10  # a rank without progress for so long ends all
LOST = 70  # the exit code of a report


def a_rank_is_killed(rank: int, device: torch.device, num_ranks: int, where: str) -> None:
    """The last rank is killed in the third step: before it, or in the forward of its second micro-batch."""
    plan = named("1f1b", num_ranks)
    with pipeline_on(device, blocks(plan.num_stages), plan, timeout_s=TIMEOUT_S) as pipeline:
        forwards = 0

        def kill(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def count(*_: Any) -> None:
            nonlocal forwards
            forwards += 1
            if forwards == 2 * plan.num_microbatches + 2:
                kill()

        if rank == num_ranks - 1 and where == "in a step":
            next(iter(pipeline.local_stages.values())).register_forward_pre_hook(count)
        for step in range(20):
            if step == 2 and rank == num_ranks - 1 and where == "between steps":
                kill()
            pipeline.step(*batch_of(plan.num_microbatches, device, step))
