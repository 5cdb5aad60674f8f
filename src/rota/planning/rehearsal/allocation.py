"""The memory that a rehearsed rank allocates: each op's bytes, which are freed when the plan frees them.

0F0  keeps 10       ▕ 6 until 0W0 ▏▕ 4 until 0I0 ▏     one block for each later op that frees a part of them
0I0  frees 4        ▕ 6 until 0W0 ▏
0W0  frees 6
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import final

import torch

from rota.errors import PipelineError
from rota.placement import Placement
from rota.runtime.device.protocol import QueuedDevice
from rota.runtime.host_memory import available_bytes
from rota.tasks import Kind, Op
from rota.units import size_text

_IN_ORDER = "FRBIW"  # of a stage's ops of one micro-batch

#: For each (stage, kind) the blocks that it allocates: bytes, and the kind that frees them (None: not in this step).
Blocks = dict[tuple[int, Kind], list[tuple[int, Kind | None]]]


def touched(num_bytes: int) -> torch.Tensor:
    """New memory, which is written to: the system provides its pages only then."""
    return torch.empty(num_bytes, dtype=torch.uint8).fill_(1)


def blocks_of(placement: Placement) -> Blocks:
    """What each task allocates, one block for each later task that frees some of it; the newest is freed first.

    Raises PipelineError if a task frees more than the tasks before it hold.
    """
    blocks: Blocks = {}
    for stage in placement.stages:
        held: list[tuple[Kind, int]] = []
        for kind in map(Kind, _IN_ORDER):
            task = placement.task(stage, kind)
            if task is None:
                continue
            blocks[stage, kind] = []
            if task.held_bytes > 0:
                held.append((kind, task.held_bytes))
            left = -task.held_bytes
            while left > 0:
                if not held:
                    raise PipelineError(
                        f"task {task} frees {-task.held_bytes} bytes, {left} more than the stage's tasks before it "
                        f"hold; correct its held_bytes, or rehearse without allocate"
                    )
                by, num_bytes = held.pop()
                blocks[stage, by].append((min(num_bytes, left), kind))
                if num_bytes > left:
                    held.append((by, num_bytes - left))
                left -= num_bytes
        for by, num_bytes in held:
            blocks[stage, by].append((num_bytes, None))
    return blocks


@final
class RankMemory:
    """The memory of one rank: its static bytes from now on, and what its ops hold. The transport holds messages.

    `held_bytes` are those of all buffers now, `peak_bytes` the most so far, and `process_bytes` the most by which the
    process has grown since this was made (None if the system does not report it). On a queued device all of it is
    there, and `process_bytes` is by what its allocator counts.
    """

    def __init__(self, placement: Placement, rank: int, device: QueuedDevice | None = None) -> None:
        self._device = device
        if device is not None:
            device.reset_peak()
        self._before_bytes = self._process_bytes()
        self.peak_bytes = 0
        self.process_bytes = None if self._before_bytes is None else 0
        self._class_in = placement.class_in
        self._blocks = [blocks_of(each) for each in placement.classes]
        self._needed = [{(task.stage, task.kind): task.peak_bytes for task in each.tasks} for each in placement.classes]
        self._static = self._allocated(placement.static_bytes[rank])
        self._held: dict[tuple[int, int], list[tuple[torch.Tensor, Kind | None]]] = {}  # by (stage, micro-batch)
        self._used = self._allocated(0)  # while an op runs
        self._look()

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers that the rank holds now."""
        held = [buffer for buffers in self._held.values() for buffer, _ in buffers]
        return sum(buffer.nbytes for buffer in (self._static, self._used, *held))

    def begin_step(self) -> None:
        """Free what no op of the previous step freed."""
        self._held.clear()

    def op_starts(self, op: Op) -> None:
        """Allocate what the op keeps, and what it needs while it runs."""
        of_class = self._class_in(op.microbatch)
        taken = [(self._allocated(num_bytes), until) for num_bytes, until in self._blocks[of_class][op.stage, op.kind]]
        self._held.setdefault((op.stage, op.microbatch), []).extend(taken)
        self._used = self._allocated(self._needed[of_class][op.stage, op.kind])
        self._look()

    def op_ends(self, op: Op) -> None:
        """Free what the op frees."""
        self._used = self._allocated(0)
        key = op.stage, op.microbatch
        self._held[key] = [(buffer, until) for buffer, until in self._held[key] if until is not op.kind]
        if not self._held[key]:
            del self._held[key]

    def _look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        if self._before_bytes is not None and self.process_bytes is not None:
            self.process_bytes = max(self.process_bytes, (self._process_bytes() or 0) - self._before_bytes)

    def _allocated(self, num_bytes: int) -> torch.Tensor:
        if self._device is None:
            return touched(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device.torch_device)  # there from now on

    def _process_bytes(self) -> int | None:
        return _resident_bytes() if self._device is None else self._device.peak_bytes()


def _resident_bytes() -> int | None:
    """The process's memory; None if the system does not report it."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else None


def refuse_too_much(needed_bytes: int, what: str, remedy: str) -> None:
    """Raise PipelineError if the machine has less memory available."""
    available = available_bytes()
    if available is not None and needed_bytes > available:
        raise PipelineError(
            f"{what} need {size_text(needed_bytes)}, and this machine has {size_text(available)} available; {remedy}"
        )
