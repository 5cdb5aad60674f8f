"""Small plans run by `rota.Pipeline` on the ranks' devices, and compared with the unsplit model on the CPU.

Each rank compares the gradients of its own stages by itself: messages between ranks are what is tested.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
from torch import nn
from torch.nn import functional

from rota.cluster import Cluster
from rota.costs import Costs
from rota.diagnosis.measuring import num_open_files
from rota.errors import RotaError
from rota.models import Stages
from rota.plan import Plan
from rota.runtime import Pipeline
from rota.schedules.families import NAMED
from rota.units import size_text

QUICK = ("1f1b", "interleaved_1f1b", "zb_h1", "dualpipe")
#: In float64, relative to the largest element of each gradient.
TOLERANCE = 1e-10

_WIDTH = 25
_ROW_BYTES = 8 * _WIDTH  # in float64
_STEPS = 3  # the first one sends descriptions of the values ahead, the others only tensors
#: Below and above NCCL's buffers, of 512 kB to 4 MB.
_FULL_BYTES = (1_000, 16_000, 256_000, 1_000_000, 4_000_000, 16_000_000, 64_000_000)
_FEW_MICROBATCHES = 2  # with large messages


@final
@dataclass(frozen=True, slots=True)
class Case:
    """One plan of the self-test: a schedule's name, ranks, micro-batches, and rows of each micro-batch."""

    family: str
    num_ranks: int
    num_microbatches: int
    rows: int = 5

    def to_fields(self) -> dict[str, Any]:
        """The case as JSON fields."""
        return asdict(self)

    @property
    def message_bytes(self) -> int:
        """Of each message between stages."""
        return self.rows * _ROW_BYTES

    @property
    def needed_bytes(self) -> int:
        """About what all ranks together hold: the batch, its gradient, and the values of the unsplit model."""
        num_stages = self.num_ranks * NAMED[self.family].stages_per_rank
        return self.num_ranks * self.message_bytes * (4 * self.num_microbatches + 4 * num_stages)

    def __str__(self) -> str:
        ranks = f"{self.num_ranks} rank{'s' if self.num_ranks != 1 else ''}"
        return f"{self.family} on {ranks}, messages of {size_text(self.message_bytes)}"

    def plan(self) -> Plan:
        """The plan. Raises RotaError where the schedule is not defined for this number of ranks."""
        family = NAMED[self.family]
        costs = Costs.uniform(self.num_ranks, 1000, 2000, activation_bytes=0, boundary_bytes=self.message_bytes)
        return family(family.place(family.costs_from(costs), Cluster.uniform(self.num_ranks)), self.num_microbatches)


def quick_cases(num_ranks: int) -> list[Case]:
    """Schedules of four kinds: plain, several stages per rank, split backwards, and both directions."""
    return _defined([Case(family, num_ranks, 2 * num_ranks) for family in QUICK])


def full_cases(num_ranks: int, with_sizes: bool) -> list[Case]:
    """Every schedule that is defined for so many ranks; `with_sizes`: messages of 1 kB to 64 MB as well."""
    cases = [Case(family, num_ranks, 2 * num_ranks) for family in NAMED]
    if with_sizes:
        cases += [Case("1f1b", num_ranks, _FEW_MICROBATCHES, size // _ROW_BYTES) for size in _FULL_BYTES[1:]]
    return _defined(cases)


def _defined(cases: Sequence[Case]) -> list[Case]:
    found = []
    for case in cases:
        try:
            case.plan()
        except RotaError:
            continue
        found.append(case)
    return found


def run_case(case: Case, device: torch.device, timeout_s: float) -> dict[str, Any]:
    """Run some steps, and compare loss and gradients of each with those of the unsplit model. Collective.

    Returns:
        Of this rank: whether the plan `trains`, the largest relative `difference` of a loss or gradient (inf: one is
        missing), the fastest step's time, `step_ns`, and how many files and sockets were open, `open_files`.
    """
    plan = case.plan()
    modules = _modules(plan.num_stages)
    unsplit = nn.Sequential(*copy.deepcopy(modules))
    stages = Stages([module.to(device) for module in modules])
    trains = any(task.kind.makes_weight_gradients for task in plan.placement.tasks)
    largest, times = 0.0, []
    with Pipeline(stages, plan, functional.mse_loss, timeout_s=timeout_s) as pipeline:
        for step in range(_STEPS):
            generator = torch.Generator().manual_seed(step)  # other data in each step: none of the last may be left
            shape = case.num_microbatches * case.rows, _WIDTH
            inputs, targets = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
            on_device = inputs.to(device), targets.to(device)
            loss_of_unsplit = _run_unsplit(unsplit, inputs, targets, case.num_microbatches, trains)
            for parameter in pipeline.parameters():
                parameter.grad = None
            start = time.perf_counter_ns()
            loss = pipeline.step(*on_device)
            if device.type != "cpu":
                torch.accelerator.synchronize()
            times.append(time.perf_counter_ns() - start)
            largest = max(largest, _relative(loss, loss_of_unsplit))
            if trains:
                largest = max(largest, _difference(pipeline, unsplit))
        open_files = num_open_files()
    return {"trains": trains, "difference": largest, "step_ns": min(times), "open_files": open_files}


def merged(of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The results of all ranks as one: the largest of each."""
    return {name: max(of_rank[name] for of_rank in of_ranks) for name in of_ranks[0]}


def _modules(num_stages: int) -> list[nn.Module]:
    generator = torch.Generator().manual_seed(0)
    modules: list[nn.Module] = []
    for _ in range(num_stages):
        layer = nn.Linear(_WIDTH, _WIDTH, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(_WIDTH, _WIDTH, dtype=torch.float64, generator=generator) / _WIDTH**0.5)
            layer.bias.copy_(torch.randn(_WIDTH, dtype=torch.float64, generator=generator))
        modules.append(nn.Sequential(layer, nn.Tanh()))
    return modules


def _run_unsplit(
    unsplit: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, num_microbatches: int, trains: bool
) -> float:
    """The loss of the whole batch; gradients are in `.grad`. In parts, so that large batches fit into memory."""
    unsplit.zero_grad(set_to_none=True)
    total = 0.0
    parts = zip(inputs.chunk(num_microbatches), targets.chunk(num_microbatches), strict=True)
    for given, wanted in parts:
        with torch.set_grad_enabled(trains):
            loss = functional.mse_loss(unsplit(given), wanted) / num_microbatches
            if trains:
                loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def _difference(pipeline: Pipeline, unsplit: nn.Module) -> float:
    """The largest relative difference of a gradient of this rank's stages."""
    expected = {id(there): here for here, there in _pairs(pipeline.stages, unsplit)}
    found = [0.0]
    for parameter in pipeline.parameters():
        there = expected[id(parameter)].grad
        if parameter.grad is None or there is None:
            return math.inf
        gradient = parameter.grad.cpu()
        if not torch.isfinite(gradient).all():
            return math.inf
        found.append(float((gradient - there).abs().max() / there.abs().max()))
    return max(found)


def _pairs(stages: Stages, unsplit: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Each parameter of the unsplit model with its copies in the stages: both streams of a bidirectional plan."""
    found = []
    modules = [*unsplit.children()]
    for number, stage in enumerate(stages.modules):
        there = modules[number % len(modules)]
        found += [*zip(there.parameters(), stage.parameters(), strict=True)]
    return found


def _relative(one: float, other: float) -> float:
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(other), 1e-300)
