"""`SchedPlan`: which block starts at which step on which devices."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, final

from rota.compat.tessel.schedule.block import Block
from rota.errors import ScheduleError

if TYPE_CHECKING:
    from rota.plan import Plan

__all__ = ["Block", "SchedPlan"]

_CELL = 4  # characters a step: "f0  b0--b0"


@final
class SchedPlan:
    """A schedule on `ndevs` devices; one micro-batch of it is a placement.

    `repetend`: (first step, step after the last) of the part that `unroll` repeats; `period`: how many steps later each
    repetition is (None: as many as that part has); `repeated`: its blocks (None: those that start in it). All three are
    set by `Composer`, where repetitions may overlap.
    """

    def __init__(self, ndevs: int) -> None:
        if not isinstance(ndevs, int) or ndevs < 1:
            raise ScheduleError(f"ndevs is {ndevs!r}; a schedule needs 1 device or more")
        self.ndevs = ndevs
        self.repetend: tuple[int, int] | None = None
        self.period: int | None = None
        self.repeated: frozenset[Block] | None = None
        self._steps: dict[Block, int] = {}
        self._devices: dict[Block, tuple[int, ...]] = {}
        self._on: list[list[Block]] = [[] for _ in range(ndevs)]  # by step

    # --- making one -----------------------------------------------------------------------------------------------

    def add_block(self, block: Block, devices: Sequence[int], step: int) -> None:
        """Raises ScheduleError where a device is busy; a block that is there already must be where it was."""
        place = tuple(devices)
        if not place or len(set(place)) != len(place) or not all(0 <= device < self.ndevs for device in place):
            raise ScheduleError(f"{block}: devices are {place}; give one or more of 0 to {self.ndevs - 1}, each once")
        if step < 0:
            raise ScheduleError(f"{block}: step is {step}; steps count from 0")
        if block in self._steps:
            if (self._steps[block], self._devices[block]) != (step, place):
                raise ScheduleError(
                    f"{block} is added on devices {place} at step {step}, but it already is on "
                    f"{self._devices[block]} at step {self._steps[block]}; make a second Block"
                )
            return
        places = [self._place(block, device, step) for device in place]
        self._steps[block], self._devices[block] = step, place
        for device, at in zip(place, places, strict=True):
            self._on[device].insert(at, block)

    def _place(self, block: Block, device: int, step: int) -> int:
        """Where in the device's blocks it belongs."""
        row = self._on[device]
        at = bisect_left(row, step, key=self._steps.__getitem__)
        for other in row[max(at - 1, 0) : at + 1]:
            start = self._steps[other]
            if start < step + block.span and step < start + other.span:
                raise ScheduleError(
                    f"{block} at steps {step} to {step + block.span - 1} meets {other} at steps {start} to "
                    f"{start + other.span - 1} on device {device}; start it at step {start + other.span}"
                )
        return at

    def add_block_seq(self, blocks: Sequence[Block | None], devices: Sequence[Sequence[int] | None]) -> None:
        """One after the other from step 0, each dependent on the one before it; None is an empty step."""
        if len(blocks) != len(devices):
            raise ScheduleError(f"{len(blocks)} blocks, but devices for {len(devices)}; give each block its devices")
        step = 0
        for block, place in zip(blocks, devices, strict=True):
            if block is not None:
                self.add_block(block, place or (), step)
            step += 1 if block is None else block.span
        for prev, following in pairwise(block for block in blocks if block is not None):
            Block.make_dependency(prev, following)

    # --- reading it -----------------------------------------------------------------------------------------------

    @property
    def nsteps(self) -> int:
        return max((step + block.span for block, step in self._steps.items()), default=0)

    def all_blocks(self) -> set[Block]:
        return set(self._steps)

    def added_blocks(self) -> list[Block]:
        """As they were added; of a placement, the i-th is sub-graph `gid` i of what is composed."""
        return list(self._steps)

    def chain_blocks(self) -> list[Block]:
        """By step, then by first device."""
        return sorted(self._steps, key=lambda block: (self._steps[block], self._devices[block][0]))

    def blocks(self, step: int) -> tuple[Block, ...]:
        """Those that start at `step`."""
        return tuple(block for block in self.chain_blocks() if self._steps[block] == step)

    def step(self, block: Block) -> int:
        return self._steps[block]

    def device(self, block: Block) -> tuple[int, ...]:
        return self._devices[block]

    def device_blocks(self, devid: int) -> tuple[Block, ...]:
        """In the order of their steps."""
        return tuple(self._on[devid])

    def peak_memory(self, device: int) -> int:
        """The most that its blocks hold."""
        held = peak = 0
        for block in self.device_blocks(device):
            held += block.memory
            peak = max(peak, held)
        return peak

    def validate(self, complete: bool = True) -> bool:
        """Whether each block starts after all that it depends on; `complete`: and all of that is there."""
        for block, step in self._steps.items():
            known = [prev for prev in block.before if prev in self._steps]
            if complete and len(known) < len(block.before):
                return False
            if any(self._steps[prev] + prev.span > step for prev in known):
                return False
        return True

    # --- others from it -------------------------------------------------------------------------------------------

    def extract(self, from_step: int, to_step: int) -> SchedPlan:
        """The blocks that start at `from_step` or later and before `to_step`, from step 0 on."""
        part = SchedPlan(self.ndevs)
        for block in self.chain_blocks():
            if from_step <= self._steps[block] < to_step:
                part.add_block(block, self._devices[block], self._steps[block] - from_step)
        return part

    def copy(self, mid: int | None = None) -> SchedPlan:
        """New blocks with the same dependencies among them; `mid`: all for this micro-batch."""
        new = {b: Block(b.mid if mid is None else mid, b.span, b.memory, b.btype, b.gid) for b in self._steps}
        copied = SchedPlan(self.ndevs)
        for block, twin in new.items():
            copied.add_block(twin, self._devices[block], self._steps[block])
            for prev in block.before & new.keys():
                Block.make_dependency(new[prev], twin)
        copied.repetend, copied.period = self.repetend, self.period
        copied.repeated = None if self.repeated is None else frozenset(new[block] for block in self.repeated)
        return copied

    def tighten(self) -> None:
        """Removes the steps at which no device does anything."""
        busy = {t for block, step in self._steps.items() for t in range(step, step + block.span)}
        place = {step: i for i, step in enumerate(sorted(busy))}
        self._steps = {block: place[step] for block, step in self._steps.items()}
        if self.repetend is not None:
            first, last = (sum(step < bound for step in busy) for bound in self.repetend)
            self.repetend = first, last

    def unroll(self, nmicros: int) -> SchedPlan:
        """The same for `nmicros` micro-batches, the repetend done more often. Raises ScheduleError."""
        from rota.compat.tessel.unrolling import unroll

        return unroll(self, nmicros)

    def to_plan(self, memory: int | None = None) -> Plan:
        """What Rota checks, simulates, draws and runs: a step is a µs, memory is in bytes, `memory` the limit."""
        from rota.compat.tessel.conversion import to_plan

        return to_plan(self, memory)

    # --- text -----------------------------------------------------------------------------------------------------

    def save(self, filename: str | os.PathLike[str]) -> None:
        """As JSON, which Tessel reads too."""
        from rota.compat.tessel.files import write

        write(self, filename)

    @staticmethod
    def load(filename: str | os.PathLike[str]) -> SchedPlan:
        """What `save` has written, or Tessel. Raises FormatError."""
        from rota.compat.tessel.files import read

        return read(filename)

    def __repr__(self) -> str:
        """A row a device: `f0  b0--b0`; `--` is an empty step, and between two `|` is what `unroll` repeats."""
        cell = max([_CELL, *(len(repr(block)) + 1 for block in self._steps)])
        return "".join(f"{self._row(device, cell)}\n" for device in range(self.ndevs))

    def _row(self, device: int, cell: int) -> str:
        row = [" ", *"--".ljust(cell) * self.nsteps]
        for block in self._on[device]:
            first, width, name = 1 + cell * self._steps[block], cell * block.span, repr(block)
            drawn = name + name.rjust(width - 2 - len(name), "-") if block.span > 1 else name
            row[first : first + width] = drawn.ljust(width)
        for bound in self._repetend_on(device):
            row[cell * bound] = "|"
        return "".join(row).rstrip()

    def _repetend_on(self, device: int) -> tuple[int, ...]:
        if self.repetend is None or self.repeated is None:
            return self.repetend or ()
        blocks = [block for block in self._on[device] if block in self.repeated]
        if not blocks:
            return ()
        return self._steps[blocks[0]], self._steps[blocks[-1]] + blocks[-1].span
