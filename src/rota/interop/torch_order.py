"""PyTorch's pipeline engine with the communication of a schedule CSV, or with the one that it derives.

PyTorch takes a CSV without communication by default, and places sends and receives itself: `derived`. `keep_order` has
it run those of the CSV.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rota import torch_internals
from rota.core import reading, schedule_csv
from rota.core.errors import FormatError, PipelineError, PlanError
from rota.core.programs.torch_order import check_torch_order
from rota.core.tasks import Kind, Op

_OLDEST = (2, 13)  # in earlier versions every received tensor requires a gradient, and every gradient is sent


def derived(text: str, *, defers_receives: bool = False) -> str:
    """The CSV with the communication that the installed PyTorch derives for one without.

    Args:
        text: The CSV without communication.
        defers_receives: Derive it as PyTorch does for `defer_pp_recv=True`.

    Raises:
        FormatError: The text is not such a CSV, or PyTorch refuses it.
        PipelineError: PyTorch is older than 2.13.
    """
    _refuse_old_torch()
    orders = schedule_csv.read(text)
    num_stages = len(schedule_csv.stage_ranks(orders))
    num_microbatches = 1 + max((op.microbatch for order in orders for op in order), default=-1)
    with _refusals():
        rows = torch_internals.derive_communication(_rows(text), num_stages, num_microbatches, defers_receives)
    return "".join(",".join(row) + "\n" for row in rows)


def schedule_from(
    path: str | Path,
    stages: Sequence[Any],
    num_microbatches: int,
    loss_fn: Callable[..., Any] | None = None,
    **options: Any,
) -> Any:
    """A schedule of PyTorch's that runs a CSV with communication as it is. Collective.

    Args:
        path: The CSV, as `Plan.to_csv(communication=True)` and `rota export torchtitan` write it.
        stages: This rank's `PipelineStage`s.
        num_microbatches: Number of micro-batches of a step.
        loss_fn: Returns the loss of an output and a target.
        options: Further ones of PyTorch's schedules, such as `scale_grads`.

    Returns:
        The schedule; its `step` is PyTorch's.

    Raises:
        FormatError: The CSV is malformed or has no communication.
        PlanError: The CSV's order could hang, see `rota.core.programs.torch_order.check_torch_order`.
        PipelineError: The CSV does not fit the stages, the ranks or the micro-batches, or differs between ranks; it
            splits backwards (I and W), and a stage is compiled; or PyTorch is older than 2.13.
    """
    return keep_order(torch_internals.new_schedule(stages, num_microbatches, loss_fn, **options), path)


def keep_order(schedule: Any, path: str | Path) -> Any:
    """Let one of PyTorch's schedules run a CSV with communication as it is, such as torchtitan's. Collective.

    Args:
        schedule: The schedule. torchtitan makes one that can for `pipeline_parallel_schedule_csv`.
        path: As for `schedule_from`.

    Returns:
        The schedule.

    Raises:
        FormatError, PlanError, PipelineError: As `schedule_from`.
    """
    _refuse_old_torch()
    if not torch_internals.takes_communication(schedule):
        raise PipelineError(
            f"a {type(schedule).__name__} runs no schedule CSV with communication; make one by "
            f"rota.interop.schedule_from, or set torchtitan's pipeline_parallel_schedule_csv"
        )
    text = reading.read_text(path)
    try:
        check_torch_order(text)
    except PlanError as error:
        raise PlanError(f"{path}: {error}", error.reason) from None
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
    stages, orders = torch_internals.stages_of(schedule), schedule_csv.read(text)
    _refuse_other_plans(path, orders, stages, torch_internals.num_microbatches_of(schedule))
    _refuse_compiled(path, orders, stages)
    _refuse_differences(path, text, stages[0])
    with _refusals():
        torch_internals.load_communication(schedule, _rows(text))
    return schedule


def _refuse_old_torch() -> None:
    if tuple(map(int, torch.__version__.split(".")[:2])) < _OLDEST:
        raise PipelineError(
            f"torch is {torch.__version__}; PyTorch's pipeline engine can be used from 2.13 on: update, or run the "
            f"plan by Rota's engine (rota.Pipeline)"
        )


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise FormatError where PyTorch refuses a schedule."""
    try:
        yield
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]  # the whole schedule may follow
        raise FormatError(f"PyTorch refuses the CSV: {reading.short(reason)}") from None


def _rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split(",") if cell.strip()] for line in text.rstrip().splitlines()]


def _refuse_other_plans(
    path: str | Path, orders: Sequence[Sequence[Op]], stages: Sequence[Any], num_microbatches: int
) -> None:
    """Raise PipelineError unless the CSV is for these stages on this rank, and for as many micro-batches."""
    on, group = schedule_csv.stage_ranks(orders), stages[0].group
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    planned = len({op.microbatch for order in orders for op in order})
    on_rank, expected = [s for s, home in enumerate(on) if home == rank], sorted(stage.stage_index for stage in stages)
    for quantity, of_csv, of_schedule in (
        ("ranks", len(orders), num_ranks),
        ("stages", len(on), stages[0].num_stages),
        ("micro-batches", planned, num_microbatches),
        (f"on rank {rank} the stages", reading.short(on_rank), reading.short(expected)),
    ):
        if of_csv != of_schedule:
            raise PipelineError(
                f"{path} has {quantity} {of_csv}, but PyTorch's schedule {of_schedule}; export the plan that runs"
            )


def _refuse_compiled(path: str | Path, orders: Sequence[Sequence[Op]], stages: Sequence[Any]) -> None:
    """Raise PipelineError if the CSV splits backwards and a module is compiled: PyTorch checks that for no CSV."""
    if not any(op.kind is Kind.W for order in orders for op in order):
        return
    for stage in stages:
        for name, module in stage.submod.named_modules():
            if torch_internals.is_compiled_module(module):
                raise PipelineError(
                    f"{path} splits backwards into I and W, which PyTorch cannot do in a compiled module, and "
                    f"{name or 'the model'!r} of stage {stage.stage_index} is compiled: turn torch.compile off, or "
                    f"export a plan with whole backwards (`rota autoplan … --whole-backward`)"
                )


def _refuse_differences(path: str | Path, text: str, stage: Any) -> None:
    """Raise PipelineError if other ranks of the pipeline read another CSV."""
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    bounds = torch.tensor([digest, -digest], device=stage.device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=stage.group)
    if bounds[0] != -bounds[1]:
        raise PipelineError(f"{path} is not the same file on all ranks of the pipeline; use the same file on all")
