"""Runs a plan with `rota.Pipeline` on stages whose ops wait: real processes, real messages, and no compute.

    device    █ 0F1 █████ 0F2 ████            █ 0B0 ██████     busy for as long as the plan says
    process   ‥‥ asleep │‥‥ asleep │‥‥ waits  ‥‥ asleep   │    ‥ the runtime's own work, beside the op

A GPU gets an op while it still runs the one before. So an op that follows at once ends at a fixed time, whatever the
runtime did in between, and an op that waited for its input begins when the process has it.

python benchmarks/rehearsal/waiting.py PLAN.json [--steps 5]     prints the simulated makespan and those of the steps
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rota
from rota.runtime.launching.launch import launch

_WARM_UP_MESSAGES, _MOST_WARM_UPS = 32, 4  # until allocators keep their pages, and connections have grown
_WAITED_NS = 100_000  # without the processor between two ops: the second one waited for its input


class Device:
    """What this process has instead of a device: when it is free, and when the process last woke up."""

    free_ns = woke_ns = woke_thread_ns = 0

    @classmethod
    def wait(cls, duration_us: int) -> None:
        """Wait for the end of an op that takes so long."""
        now_ns = time.monotonic_ns()
        waited_ns = now_ns - cls.woke_ns - (time.thread_time_ns() - cls.woke_thread_ns)
        begun_ns = now_ns if waited_ns > _WAITED_NS else cls.free_ns
        cls.free_ns = begun_ns + 1000 * duration_us
        if (left_ns := cls.free_ns - time.monotonic_ns()) > 0:
            time.sleep(left_ns / 1e9)
        else:
            cls.free_ns = time.monotonic_ns()
        cls.woke_ns, cls.woke_thread_ns = time.monotonic_ns(), time.thread_time_ns()


class _Received(torch.autograd.Function):
    """A number of what is received; its backward waits, and makes a gradient of the same size."""

    @staticmethod
    def forward(ctx: Any, received: torch.Tensor, backward_us: int) -> torch.Tensor:
        ctx.shape, ctx.us = received.shape, backward_us
        return received.new_zeros(1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        made = gradient.new_empty(ctx.shape)
        Device.wait(ctx.us)
        return made, None


class _Weight(torch.autograd.Function):
    """A weight whose gradient takes time."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, weight_us: int) -> torch.Tensor:
        ctx.us = weight_us
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.us:
            Device.wait(ctx.us)
        return gradient, None


class _Sent(torch.autograd.Function):
    """A tensor of so many numbers."""

    @staticmethod
    def forward(_: Any, number: torch.Tensor, size: int) -> torch.Tensor:
        return number.new_empty(1, size) if size > 1 else number.new_zeros(1, 1)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> Any:
        return gradient[:, :1], None


class WaitingStage(nn.Module):
    """A stage of a chain whose ops take as long as in the plan; its output has as many bytes, to the next four."""

    def __init__(self, plan: rota.Plan, stage: int) -> None:
        super().__init__()
        tasks = {task.kind.value: task for task in plan.placement.tasks if task.stage == stage}
        sizes = [edge.num_bytes for edge in plan.placement.edges if plan.placement.tasks[edge.source] is tasks["F"]]
        self.is_first = stage == 0
        self.forward_us = tasks["F"].duration_us
        self.backward_us = tasks["B" if "B" in tasks else "I"].duration_us
        self.weight_us = tasks["W"].duration_us if "W" in tasks else 0
        if self.is_first:  # its input needs no gradient: I does nothing, and B makes those of the weights alone
            self.backward_us, self.weight_us = 0, self.weight_us or self.backward_us
        self.size = max([-(-num_bytes // 4) for num_bytes in sizes], default=1)
        self.weight = nn.Parameter(torch.zeros(1, 1))

    def forward(self, received: torch.Tensor) -> torch.Tensor:
        weight = _Weight.apply(self.weight, self.weight_us)
        read = weight if self.is_first else _Received.apply(received, self.backward_us) + weight
        made = _Sent.apply(read, self.size)
        Device.wait(self.forward_us)
        return made


def stages_of(plan: rota.Plan) -> rota.Stages:
    """A stage that waits for each one of the plan."""
    return rota.Stages([WaitingStage(plan, stage) for stage in range(plan.num_stages)])


def work(folder: Path, num_steps: int) -> None:
    """On each process: warm-up steps, and `num_steps` whose timelines the first one writes."""
    torch.set_num_threads(1)
    plan, timelines = rota.given_plan(), []
    num_warm_ups = min(max(-(-_WARM_UP_MESSAGES // plan.num_microbatches), 1), _MOST_WARM_UPS)
    batch = torch.zeros(plan.num_microbatches, 1)
    with rota.Pipeline(stages_of(plan), plan, lambda output, _: output.sum(), check_data="never") as pipeline:
        for _ in range(num_warm_ups + num_steps):
            pipeline.step(batch, batch)
            timelines.append(pipeline.timeline())
        if pipeline.rank == 0:
            (folder / "timelines.json").write_text(json.dumps([of.to_json() for of in timelines[num_warm_ups:]]))


def rehearse(plan: rota.Plan, num_steps: int = 5) -> list[rota.Timeline]:
    """The measured timelines of steps of a plan, whose stages are a chain, on new processes of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        launch(plan, __file__, ["--folder", folder, "--steps", str(num_steps)])
        return [rota.Timeline.from_json(text) for text in json.loads(Path(folder, "timelines.json").read_text())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", nargs="?")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # of a process of the run
    given = parser.parse_args()
    if given.folder is not None:
        work(Path(given.folder), given.steps)
        return
    plan = rota.Plan.from_json(Path(given.plan).read_text())
    planned_us = rota.simulate(plan).makespan_us
    for timeline in rehearse(plan, given.steps):
        change = timeline.makespan_us / planned_us - 1
        print(f"{timeline.makespan_us / 1000:,.1f} ms against {planned_us / 1000:,.1f} simulated, {change:+.1%}")


if __name__ == "__main__":
    main()
