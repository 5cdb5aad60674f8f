"""A plan's CSV as PyTorch's engine runs it on one rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from rota.interop.torch_stages import StageModule, Tick, torch_stage

_CELL = re.compile(r"(\d+)(F|B|I|W|SEND_B)(\d+)")


class PlannedSchedule(_PipelineScheduleRuntime):
    """PyTorch's runtime, which is made to be extended by whoever has a schedule; takes each loss where it was made.

    It keeps losses in the order in which they are made and looks them up by micro-batch.
    """

    tick: Tick

    def _maybe_compute_loss(self, *_: Any, **__: Any) -> None:
        pass  # the last stage returns it

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Any:
        self.tick(f"{stage.stage_index}B{mb_index}")
        return stage.fwd_cache[mb_index][0][0] if stage.is_last else None


def planned_schedule(
    modules: Sequence[StageModule],
    row: Sequence[str],
    homes: Mapping[int, int],
    group: dist.ProcessGroup,
    num_microbatches: int,
    trains: bool,
) -> PlannedSchedule:
    """For surveyed `modules`, this rank's; `row`: its cells; `homes`: the ranks in `group` of all stages.

    The cells are handed over without PyTorch's validation, which knows no plans of forwards alone; ours is stricter.
    """
    stages = [torch_stage(module, group) for module in modules]
    # The shares of the mean loss are in it already: PyTorch's scaling would divide what earlier steps added as well.
    schedule = PlannedSchedule(  # type: ignore[no-untyped-call]
        stages, num_microbatches, loss_fn=_in_its_place if trains else None, scale_grads=False
    )
    schedule.tick = modules[0].tick
    schedule.stage_index_to_group_rank = dict(homes)
    for stage in stages:
        stage.stage_index_to_group_rank = dict(homes)
        stage.has_backward = trains
    cells = with_whole_backwards(row, {module.stage: module.layouts.backward_at for module in modules})
    schedule.pipeline_order_with_comms = {dist.get_rank(group): [_Action.from_str(cell) for cell in cells]}
    return schedule


def _in_its_place(*_: Any) -> None:
    raise AssertionError("PyTorch takes a schedule with a loss for one that trains; the last stage computes it")


def run(schedule: PlannedSchedule) -> None:
    """One step of a schedule."""
    for stage in schedule._stages:
        stage.clear_runtime_states()
    numbers = range(schedule._n_microbatches)
    schedule._step_microbatches(kwarg_mbs=[{"microbatch": m} for m in numbers], return_outputs=False)


def with_whole_backwards(row: Sequence[str], backward_at: Mapping[int, str]) -> list[str]:
    """The cells with I and W as one B, in the place of either, for the stages that say so."""
    cells = []
    for cell in row:
        match = _CELL.fullmatch(cell)
        at = backward_at[int(match[1])] if match else ""
        if match is None or at == "I and W" or match[2] in "FB":
            cells.append(cell)
        elif match[2] == at:
            cells.append(f"{match[1]}B{match[3]}")
        elif match[2] == "SEND_B" and at == "I":
            cells.append(cell)  # in W's place nothing is sent: no input wants a gradient
    return cells
