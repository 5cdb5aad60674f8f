"""Jobs that measure what a device does: memory, times, and where the host waits."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import rota
from rota import Cluster, Costs, Plan, Stages, place, simulate
from rota.runtime.device.protocol import is_queued
from rota.schedules import NAMED
from support.gpu.exactness import named, tied
from support.gpu.models import batch_of, blocks, on_one_rank, pipeline_on

# --- the machine ------------------------------------------------------------------------------------------------------


def machine(rank: int, device: torch.device) -> dict[str, Any]:
    """What a result is read with: hardware and versions."""
    found: dict[str, Any] = {"device_type": device.type, "torch": torch.__version__, "rota": rota.__version__}
    found |= {"python": platform.python_version(), "system": platform.platform()}
    if device.type == "cuda":
        found["devices"] = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        found |= {"cuda": torch.version.cuda, "hip": torch.version.hip}
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


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
    plan: Plan = NAMED[schedule](place(costs, Cluster.uniform(num_stages)), num_microbatches)
    plan = on_one_rank(plan) if num_ranks == 1 else plan
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
