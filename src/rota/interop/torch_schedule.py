"""A plan's CSV as PyTorch's engine runs it on one rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from rota.interop.torch_stages import StageModule, torch_stage
from rota.torch_internals import pipelining_schedule

_CELL = re.compile(r"(\d+)(F|B|I|W|SEND_B)(\d+)")


def planned_schedule(
    modules: Sequence[StageModule],
    row: Sequence[str],
    homes: Mapping[int, int],
    group: dist.ProcessGroup,
    num_microbatches: int,
    trains: bool,
) -> Any:
    """The schedule of this rank's surveyed `modules`; `row` has its cells, `homes` the rank in `group` of each stage.

    Each loss is already its share of the mean: PyTorch's scaling would also divide the gradients of earlier steps.
    """
    stages = [torch_stage(module, group) for module in modules]
    cells = with_whole_backwards(row, {module.stage: module.layouts.backward_at for module in modules})
    return pipelining_schedule(stages, num_microbatches, cells, homes, dist.get_rank(group), trains, modules[0].tick)


def with_whole_backwards(row: Sequence[str], backward_at: Mapping[int, str]) -> list[str]:
    """The cells, with B instead of I or of W for the stages whose backward is whole there."""
    cells = []
    for cell in row:
        match = _CELL.fullmatch(cell)
        at = backward_at[int(match[1])] if match else ""
        if match is None or at == "I and W" or match[2] in "FB":
            cells.append(cell)
        elif match[2] == at:
            cells.append(f"{match[1]}B{match[3]}")
        elif match[2] == "SEND_B" and at == "I":
            cells.append(cell)  # instead of W, nothing is sent: no input requires a gradient
    return cells
