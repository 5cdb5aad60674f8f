"""Jobs of the tests on accelerators: what a device does, and what only its own tensors show."""

from __future__ import annotations

import os
import platform
import signal
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rota
from rota import Cluster, Costs, Pipeline, Plan, Stages, place, simulate
from rota.runtime import channels
from rota.runtime.channels import Channels
from rota.runtime.device.protocol import is_queued
from rota.schedules import NAMED
from rota.torch_internals import backend_of, message_options, move_message
from support.checkpoint_runs import Run, Training, model
from support.networks import cleared_step, loss_fn, serial_microbatches

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


def worst(found: Named, expected: Named) -> float:
    """The largest difference, relative to the largest number of the tensor that it is in.

    A tensor of nearly nothing counts as a thousandth of the largest of all.
    """
    sizes = {key: float(tensor.abs().max()) for key, tensor in expected.items()}
    floor = max(sizes.values()) / 1000
    return largest(float((found[key] - expected[key]).abs().max()) / max(sizes[key], floor) for key in found)


def largest(numbers: Iterable[float]) -> float:
    """The largest number; nan if one is."""
    return float(torch.tensor([*numbers], dtype=torch.float64, device="cpu").max())


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
    whole, differences = make().to(device), list[float]()
    with pipeline_on(device, make(), plan) as pipeline:
        for module in pipeline.stages.modules if backend else ():
            module.compile(backend=backend)
        for seed in range(2):
            batch = batch_of(plan.num_microbatches, device, seed, **sizes)
            with context():
                step = cleared_step(pipeline, *batch)
                expected = serial_microbatches(whole, batch, plan.num_microbatches)
            assert len(step.gradients) == len([*pipeline.parameters()])
            differences += [abs(step.loss / expected.loss - 1), worst(step.gradients, expected.gradients)]
    return largest(differences)


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
    return largest(
        compared(device, plan, lambda n=size // 4: Stages([Scale(n), Scale(n)]), rows=1, width=size // 4)  # type: ignore[misc]
        for size in sizes
    )


@contextmanager
def poisoned_releases(device: torch.device, *, are_early: bool) -> Iterator[None]:
    """Messages start late, and memory that the runtime lets go of gets nan: who still reads it has nan.

    `are_early`: values are let go of as soon as their send is enqueued, which must be noticed.
    """
    compute, module = torch.accelerator.current_stream(device), torch.get_device_module(device)
    freed: list[tuple[torch.Size, torch.dtype]] = []

    def poison() -> None:
        with compute:
            for shape, dtype in freed:  # the allocator gives out what was freed last
                torch.full(shape, torch.nan, dtype=dtype, device=device)
            freed.clear()

    def move_late(backend: Any, tensor: Tensor, options: Any) -> None:
        poison()
        module._sleep(LATE_TICKS)
        move_message(backend, tensor, options)
        weakref.finalize(tensor, freed.append, (tensor.shape, tensor.dtype))

    def send(self: Channels, passage: Any, tensors: list[Tensor], stream: Any) -> Any:
        end = held(self, passage, tensors, stream)
        if are_early:
            self._sent[passage] = []
        return end

    held = Channels._send
    with patch.object(channels, "move_message", move_late), patch.object(Channels, "_send", send):
        yield


LATE_TICKS = 2_000_000  # of the device's clock: about a millisecond


def poisoned(rank: int, device: torch.device, are_early: bool) -> float:
    """The largest difference of gradients with `poisoned_releases`."""
    plan = named("zb_h1", 2)
    with poisoned_releases(device, are_early=are_early):
        return compared(device, plan, lambda: blocks(plan.num_stages), rows=256)


def beside_ddp(rank: int, device: torch.device, num_ranks: int) -> float:
    """The largest difference of gradients of a pipeline, and of a model of the script's own in DDP beside it."""
    plan, modules = named("1f1b", num_ranks), [blocks(1).to(device)[0] for _ in range(2)]
    own, x = DistributedDataParallel(modules[0]), batch_of(num_ranks, device)[0]

    @contextmanager
    def training_own() -> Iterator[None]:
        own(x.chunk(num_ranks)[rank]).square().mean().backward()
        yield
        modules[1](x).square().mean().backward()

    of_pipeline = compared(device, plan, lambda: blocks(plan.num_stages), context=training_own)
    found, expected = ({(0, name): p.grad for name, p in m.named_parameters()} for m in modules)
    return largest([of_pipeline, worst(found, expected)])  # type: ignore[arg-type]


def wrapped(rank: int, device: torch.device, pp: int, dp: int, schedule: str) -> float:
    """Stages in FSDP2: the largest difference of weights after some steps of SGD."""
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
            serial_microbatches(whole, batch, dp * plan.num_microbatches)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found: Any = {(s, name): p for s, m in pipeline.local_stages.items() for name, p in m.named_parameters()}
        expected = {(s, name): p.detach() for s, m in enumerate(whole.modules) for name, p in m.named_parameters()}
        return worst({key: weight.full_tensor().detach() for key, weight in found.items()}, expected)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def trained(rank: int, device: torch.device, run: Run, folder: Path, begin: int, end: int) -> list[float]:
    """Go on from what is there, and save after each step without a wait of the host; the losses."""
    training = Training(run, rota.split(model(), run.plan().num_stages).to(device))
    losses: list[float] = []
    with training.pipeline, closing(training.checkpoints(folder, asynchronous=True)) as checkpoints:
        checkpoints.load()
        for step in range(begin, end):
            losses += training.steps(range(step, step + 1))
            checkpoints.wait()
            with waits_are_errors(device):
                checkpoints.save(step + 1)
        checkpoints.wait()
    return losses


# --- the host ---------------------------------------------------------------------------------------------------------


@contextmanager
def waits_are_errors(device: torch.device) -> Iterator[None]:
    """A host that waits for its device inside raises RuntimeError. PyTorch knows that of CUDA alone."""
    if device.type == "sim":
        from support.sim_device.groups import syncs_inside_steps

        syncs_inside_steps()
        yield
        if waits := syncs_inside_steps():
            raise RuntimeError(f"synchronizing: {waits}")
    elif device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    else:
        yield


def a_wait_is_an_error(rank: int, device: torch.device) -> None:
    """`waits_are_errors` sees a wait at all."""
    with pytest.raises(RuntimeError, match="synchroniz"), waits_are_errors(device):
        torch.ones((), device=device).item()


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


def host_cost(
    rank: int, device: torch.device, num_ranks: int, schedule: str, width: int, rows: int
) -> dict[str, float]:
    """Of steps without waiting, per op or message of this rank, in µs: the host's CPU time, and the time of all.

    `op_us`: how long the device takes for an op. Where it is longer, the device never waits for its host.
    """
    plan, num_steps = named(schedule, num_ranks), 20
    transfers = sum(rank in (transfer.sender, transfer.receiver) for transfer in plan.transfers)
    num_actions = (len(plan.orders[rank]) + transfers) * num_steps
    with pipeline_on(device, blocks(plan.num_stages, width=width), plan) as pipeline:
        batch = batch_of(plan.num_microbatches, device, rows=rows, width=width)
        for _ in range(3):
            pipeline.step(*batch)
        begun_s, host_s = time.monotonic(), 0.0
        for _ in range(num_steps):
            before_s = time.thread_time()
            handle = pipeline.begin_step(*batch)
            host_s += time.thread_time() - before_s
        handle.wait()
        all_s = time.monotonic() - begun_s
        pipeline.step(*batch)
        timeline = pipeline.timeline()
        op_us = (sum(timeline.ends_us[rank]) - sum(timeline.starts_us[rank])) / len(timeline.ends_us[rank])
    return {"host_us": 1e6 * host_s / num_actions, "all_us": 1e6 * all_s / num_actions, "op_us": op_us}


def gemm_beside_receive(rank: int, device: torch.device, num_ctas: int, size: int, repeats: int) -> dict[str, float]:
    """By how much products of matrices take longer beside a receive that waits for its sender with so many CTAs.

    `waited`: whether it did to the end; if not, the number is too low.
    """
    options: Any = None
    backend = dist.get_default_backend_for_device(device)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options.config.min_ctas = options.config.max_ctas = num_ctas
    channel = backend_of(dist.new_group([0, 1], backend=backend, pg_options=options), device)
    beside, message = torch.Stream(device), torch.ones(4 * size * size, device=device)
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))

    def products_us() -> float:
        begun_s = time.monotonic()
        for _ in range(repeats):
            a @ b
        torch.accelerator.current_stream(device).record_event().synchronize()
        return (time.monotonic() - begun_s) * 1e6 / repeats

    move_message(channel, message, message_options(0))
    products_us()
    alone_us = products_us()
    torch.accelerator.synchronize(device)
    dist.all_reduce(torch.zeros(1, device="cpu"))
    if rank == 0:
        time.sleep(LATE_S)
    with beside:
        move_message(channel, message, message_options(0))
    moved = beside.record_event()
    beside_us, waited = products_us(), not moved.query()
    moved.synchronize()
    return {"alone_us": alone_us, "beside_us": beside_us, "waited": waited}


LATE_S = 0.3  # a sender, and longer than its receiver computes

# --- the machine, and a rank that is lost -----------------------------------------------------------------------------


def machine(rank: int, device: torch.device) -> dict[str, Any]:
    """What a result is read with: hardware and versions."""
    found: dict[str, Any] = {"device_type": device.type, "torch": torch.__version__, "rota": rota.__version__}
    found |= {"python": platform.python_version(), "system": platform.platform()}
    if device.type == "cuda":
        found["devices"] = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        found |= {"cuda": torch.version.cuda, "hip": torch.version.hip, "nccl": torch.cuda.nccl.version()}
    return found


def exchanged(rank: int, device: torch.device) -> float:
    """The number of ranks, if their devices can exchange tensors."""
    number = torch.ones((), device=device)
    dist.all_reduce(number)
    return number.item()


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
