"""`SchedPlan`: which block starts at which step on which devices."""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, final

import msgspec

from rota.compat.tessel.conversion import to_plan
from rota.compat.tessel.schedule.block import Block, Blocks, by_subgraph, gid_of
from rota.core import reading
from rota.core.errors import FormatError, ScheduleError
from rota.core.plan import Plan
from rota.core.reading import Field
from rota.core.whole_numbers import Positive, Whole
from rota.core.writing import write_text

__all__ = ["Block", "SchedPlan"]

_CELL = 4  # characters per step: "f0  b0--b0"
_MAX_DEVICES, _MAX_CELLS = 10_000, 1_000_000  # of a schedule in a file; cells are devices times steps


@final
class SchedPlan:
    """A schedule of blocks; a schedule of one micro-batch is a placement.

    `Composer` sets the last three attributes; its repetitions may overlap.

    Args:
        ndevs: The number of devices.

    Attributes:
        ndevs: The number of devices.
        repetend: (first step, step after the last) of the part that `unroll` repeats.
        period: How many steps each repetition starts after the one before. None: the length of the repetend.
        repeated: The blocks of the repetend. None: those that start in it.
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
        self._rows: list[list[Block]] = [[] for _ in range(ndevs)]  # the blocks of each device, by step

    # --- making one -----------------------------------------------------------------------------------------------

    def add_block(self, block: Block, devices: Sequence[int], step: int) -> None:
        """Add a block.

        Args:
            block: The block. If it was added before, devices and step must be the same.
            devices: The devices that run it together.
            step: The step at which it starts, from 0.

        Raises:
            ScheduleError: If a device is busy, or an argument is wrong.
        """
        own = tuple(devices)
        if not own or len(set(own)) != len(own) or not all(0 <= device < self.ndevs for device in own):
            raise ScheduleError(f"{block}: devices are {own}; give one or more of 0 to {self.ndevs - 1}, each once")
        if step < 0:
            raise ScheduleError(f"{block}: step is {step}; steps count from 0")
        if block in self._steps:
            if (self._steps[block], self._devices[block]) != (step, own):
                raise ScheduleError(
                    f"{block} is added on devices {own} at step {step}, but it already is on "
                    f"{self._devices[block]} at step {self._steps[block]}; make a second Block"
                )
            return
        positions = [self._position(block, device, step) for device in own]
        self._steps[block], self._devices[block] = step, own
        for device, position in zip(own, positions, strict=True):
            self._rows[device].insert(position, block)

    def _position(self, block: Block, device: int, step: int) -> int:
        """Return the index of a new block among the device's blocks, or raise ScheduleError if the device is busy."""
        row = self._rows[device]
        position = bisect_left(row, step, key=self._steps.__getitem__)
        for other in row[max(position - 1, 0) : position + 1]:
            start = self._steps[other]
            if start < step + block.span and step < start + other.span:
                raise ScheduleError(
                    f"{block} at steps {step} to {step + block.span - 1} meets {other} at steps {start} to "
                    f"{start + other.span - 1} on device {device}; start it at step {start + other.span}"
                )
        return position

    def add_block_seq(self, blocks: Sequence[Block | None], devices: Sequence[Sequence[int] | None]) -> None:
        """Add blocks one after the other from step 0, each dependent on the one before; None is an empty step."""
        if len(blocks) != len(devices):
            raise ScheduleError(f"{len(blocks)} blocks, but devices for {len(devices)}; give each block its devices")
        step = 0
        for block, own in zip(blocks, devices, strict=True):
            if block is not None:
                self.add_block(block, own or (), step)
            step += 1 if block is None else block.span
        for prev, following in pairwise(block for block in blocks if block is not None):
            Block.make_dependency(prev, following)

    # --- reading it -----------------------------------------------------------------------------------------------

    @property
    def nsteps(self) -> int:
        """The number of steps from the first to the end of the last block."""
        return max((step + block.span for block, step in self._steps.items()), default=0)

    def all_blocks(self) -> set[Block]:
        """Return all blocks."""
        return set(self._steps)

    def added_blocks(self) -> list[Block]:
        """Return all blocks in the order in which they were added; `Composer` makes number i sub-graph `gid` i."""
        return list(self._steps)

    def chain_blocks(self) -> list[Block]:
        """Return all blocks by step, then by first device."""
        return sorted(self._steps, key=lambda block: (self._steps[block], self._devices[block][0]))

    def blocks(self, step: int) -> tuple[Block, ...]:
        """Return the blocks that start at `step`."""
        return tuple(block for block in self.chain_blocks() if self._steps[block] == step)

    def step(self, block: Block) -> int:
        """Return the step at which a block starts."""
        return self._steps[block]

    def device(self, block: Block) -> tuple[int, ...]:
        """Return the devices of a block."""
        return self._devices[block]

    def device_blocks(self, devid: int) -> tuple[Block, ...]:
        """Return the blocks of a device, by step."""
        return tuple(self._rows[devid])

    def peak_memory(self, device: int) -> int:
        """Return the maximum of what a device's blocks have allocated."""
        held = peak = 0
        for block in self.device_blocks(device):
            held += block.memory
            peak = max(peak, held)
        return peak

    def validate(self, complete: bool = True) -> bool:
        """Return whether each block starts after its dependencies and, with `complete`, whether none is missing."""
        for block, step in self._steps.items():
            known = [prev for prev in block.before if prev in self._steps]
            if complete and len(known) < len(block.before):
                return False
            if any(self._steps[prev] + prev.span > step for prev in known):
                return False
        return True

    # --- deriving others ------------------------------------------------------------------------------------------

    def extract(self, from_step: int, to_step: int) -> SchedPlan:
        """Return a schedule of the blocks that start in [from_step, to_step); `from_step` becomes step 0."""
        part = SchedPlan(self.ndevs)
        for block in self.chain_blocks():
            if from_step <= self._steps[block] < to_step:
                part.add_block(block, self._devices[block], self._steps[block] - from_step)
        return part

    def copy(self, mid: int | None = None) -> SchedPlan:
        """Return a schedule of new blocks with the same dependencies; with `mid`, all of them for this micro-batch."""
        new = {b: Block(b.mid if mid is None else mid, b.span, b.memory, b.btype, b.gid) for b in self._steps}
        copied = SchedPlan(self.ndevs)
        for block, own in new.items():
            copied.add_block(own, self._devices[block], self._steps[block])
            for prev in block.before & new.keys():
                Block.make_dependency(new[prev], own)
        copied.repetend, copied.period = self.repetend, self.period
        copied.repeated = None if self.repeated is None else frozenset(new[block] for block in self.repeated)
        return copied

    def tighten(self) -> None:
        """Remove the steps at which all devices are idle."""
        busy = {t for block, step in self._steps.items() for t in range(step, step + block.span)}
        new_step = {step: i for i, step in enumerate(sorted(busy))}
        self._steps = {block: new_step[step] for block, step in self._steps.items()}
        if self.repetend is not None:
            first, last = (sum(step < bound for step in busy) for bound in self.repetend)
            self.repetend = first, last

    def unroll(self, nmicros: int) -> SchedPlan:
        """Return this schedule for `nmicros` micro-batches, with more repetitions of the repetend.

        Raises:
            ScheduleError: If `nmicros` is too small, or the schedule has no repetend with a block of each sub-graph.
        """
        blocks = by_subgraph(self.added_blocks())
        nmids = 1 + max(mid for _, mid in blocks)
        if nmicros < nmids:
            raise ScheduleError(
                f"nmicros is {nmicros}, but the schedule has {nmids} micro-batches; unroll it to {nmids} or more"
            )
        more = nmicros - nmids
        middle, period = self._middle()
        unrolled = SchedPlan(self.ndevs)
        new: Blocks = {}
        repeated = [] if self.repeated is None else [(gid_of(block), block.mid) for block in self.repeated]
        for (gid, mid), block in blocks.items():
            copies = [(mid, 0)] if mid < middle[gid] else [(mid + more, more)]
            if mid == middle[gid]:
                copies = [(mid + i, i) for i in range(more + 1)]
                repeated += [(gid, new_mid) for new_mid, _ in copies]
            for new_mid, i in copies:
                new[gid, new_mid] = Block(new_mid, block.span, block.memory, block.btype, gid)
                unrolled.add_block(new[gid, new_mid], self.device(block), self.step(block) + i * period)
        _connect(blocks, new)
        assert self.repetend is not None
        first, last = self.repetend
        unrolled.repetend, unrolled.period = (first, last + more * period), period
        unrolled.repeated = frozenset(new[key] for key in repeated)
        return unrolled

    def _middle(self) -> tuple[dict[int, int], int]:
        """Return for each sub-graph the last micro-batch in the repetend, and the period of the repetitions."""
        if self.repetend is None:
            raise ScheduleError(
                "the schedule has no repetend; set it to (first step, step after the last), or compose one"
            )
        first, last = self.repetend
        repeated = self.repeated
        if repeated is None:
            repeated = frozenset(block for block, step in self._steps.items() if first <= step < last)
        middle: dict[int, int] = {}
        for block in repeated:
            middle[gid_of(block)] = max(block.mid, middle.get(gid_of(block), 0))
        absent = {gid_of(block) for block in self._steps} - middle.keys()
        if absent:
            raise ScheduleError(f"the repetend {self.repetend} has no block of sub-graph {min(absent)}; make it longer")
        return middle, last - first if self.period is None else self.period

    def to_plan(self, memory: int | None = None) -> Plan:
        """Return a plan that Rota can check, simulate, draw and run.

        Args:
            memory: The limit per device in bytes; None for no limit.

        Returns:
            A plan in which a step is 1 µs, and memory is in bytes.

        Raises:
            ScheduleError: If blocks are missing, or micro-batches differ.
        """
        return to_plan(self, memory)

    # --- text -----------------------------------------------------------------------------------------------------

    def save(self, filename: str | os.PathLike[str]) -> None:
        """Save as JSON with Tessel's fields, and what Tessel leaves out: dependencies, `period` and `repeated`."""
        index = {block: i for i, block in enumerate(self._steps)}
        rows: list[dict[str, Any]] = [
            {
                **{name: getattr(block, name) for name in ("mid", "span", "memory", "btype", "gid")},
                "step": step,
                "device": list(self._devices[block]),
                "before": sorted(index[prev] for prev in block.before if prev in index),
            }
            for block, step in self._steps.items()
        ]
        fields = {
            "ndevs": self.ndevs,
            "repetend": self.repetend,
            "period": self.period,
            "repeated": None if self.repeated is None else sorted(index[block] for block in self.repeated),
            "blocks": rows,
        }
        write_text(filename, json.dumps(fields) + "\n")

    @staticmethod
    def load(filename: str | os.PathLike[str]) -> SchedPlan:
        """Return the schedule in a file that `save` or Tessel has written. Raises FormatError."""
        text = reading.read_text(filename)
        try:
            return Field("schedule", reading.load(text)).read(_ScheduleFile).schedule()
        except (FormatError, ScheduleError) as error:
            raise FormatError(f"{str(filename)!r}: {error}") from None

    def __repr__(self) -> str:
        """One row per device: `f0  b0--b0`; `--` is an empty step, and `unroll` repeats what is between two `|`."""
        cell = max([_CELL, *(len(repr(block)) + 1 for block in self._steps)])
        return "".join(f"{self._row(device, cell)}\n" for device in range(self.ndevs))

    def _row(self, device: int, cell: int) -> str:
        """Return the row of a device, with `cell` characters per step."""
        row = [" ", *"--".ljust(cell) * self.nsteps]
        for block in self._rows[device]:
            first, width, name = 1 + cell * self._steps[block], cell * block.span, repr(block)
            text = name + name.rjust(width - 2 - len(name), "-") if block.span > 1 else name
            row[first : first + width] = text.ljust(width)
        for bound in self._repetend_on(device):
            row[cell * bound] = "|"
        return "".join(row).rstrip()

    def _repetend_on(self, device: int) -> tuple[int, ...]:
        """Return the first step of a device's repetend and the step after its last, or nothing."""
        if self.repetend is None or self.repeated is None:
            return self.repetend or ()
        blocks = [block for block in self._rows[device] if block in self.repeated]
        if not blocks:
            return ()
        return self._steps[blocks[0]], self._steps[blocks[-1]] + blocks[-1].span


def _connect(blocks: Blocks, new: Blocks) -> None:
    """Give each new block the dependencies of its sub-graph, within its micro-batch."""
    before = {gid: {prev.gid for prev in block.before if prev.gid is not None} for (gid, _), block in blocks.items()}
    for (gid, mid), block in new.items():
        for prev in before[gid]:
            Block.make_dependency(new[prev, mid], block)


class _BlockFile(msgspec.Struct):
    """A block in JSON; Tessel's own files lack what has a default."""

    mid: Any
    span: Any
    memory: Any  # Tessel writes 1.0, too; Block checks all three
    btype: str
    step: Whole
    device: tuple[Whole, ...]
    gid: Whole | None = None
    before: tuple[Whole, ...] | None = ()


class _ScheduleFile(msgspec.Struct):
    """A schedule in JSON; blocks are named by their places in the list."""

    ndevs: Annotated[int, msgspec.Meta(ge=1, le=_MAX_DEVICES)]
    blocks: tuple[_BlockFile, ...]
    repetend: tuple[Whole, Whole] | None
    period: Positive | None = None
    repeated: tuple[Whole, ...] | None = None

    def schedule(self) -> SchedPlan:
        """The schedule. Raises FormatError or ScheduleError."""
        schedule = SchedPlan(self.ndevs)
        blocks = [Block(row.mid, row.span, row.memory, row.btype, row.gid) for row in self.blocks]
        named = {i for row in self.blocks for i in row.before or ()} | {*(self.repeated or ())}
        if unknown := sorted(i for i in named if i >= len(blocks)):
            raise FormatError(f"schedule names block {unknown[0]}, but has {len(blocks)} blocks; count from 0")
        for row, block in zip(self.blocks, blocks, strict=True):
            schedule.add_block(block, row.device, row.step)
            for prev in row.before or ():
                Block.make_dependency(blocks[prev], block)
        schedule.repetend, schedule.period = self.repetend, self.period
        schedule.repeated = None if self.repeated is None else frozenset(blocks[i] for i in self.repeated)
        if (num_cells := schedule.ndevs * schedule.nsteps) > _MAX_CELLS:
            raise FormatError(f"schedule has {num_cells:,} devices times steps; a file may have {_MAX_CELLS:,}")
        return schedule
