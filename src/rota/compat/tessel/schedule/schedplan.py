"""`Block` and `SchedPlan`: which sub-graph of the model starts at which step on which devices.

As a placement of Rota, each forward block is a stage, in the order in which the blocks were added. A backward block is
the backward of the last forward block on the same devices that it depends on. Blocks that nothing connects are separate
components of the placement: micro-batch m of Tessel's is then one micro-batch per component, number m * components +
component.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any, TypeAlias, final

import msgspec

from rota.core import reading
from rota.core.cluster import Cluster
from rota.core.errors import FormatError, ScheduleError
from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.core.reading import Field, Positive, Whole, short
from rota.core.tasks import Edge, Kind, Op, Task, scalar
from rota.core.writing import write_text
from rota.schedules.common import depth

_CELL = 4  # characters per step: "f0  b0--b0"
_MAX_DEVICES, _MAX_CELLS = 10_000, 1_000_000  # of a schedule in a file; cells are devices times steps


@final
class Block:
    """A sub-graph of the model for one micro-batch.

    `before` has the blocks that it depends on, `after` those that depend on it.

    Args:
        mid: The micro-batch, from 0.
        span: How many steps it lasts, 1 or more.
        memory: What it allocates (+) or frees (−) when it starts.
        btype: "forward" or "backward", in any case.
        gid: The sub-graph; blocks of different micro-batches with the same number are the same sub-graph.

    Raises:
        ScheduleError: If an argument is wrong.
    """

    def __init__(self, mid: int, span: int, memory: int, btype: str, gid: int | None = None) -> None:
        self.mid = _whole("mid", mid, 0)
        self.span = _whole("span", span, 1)
        self.memory = _whole("memory", memory, None)
        self.btype = str(btype).lower()
        if self.btype not in ("forward", "backward"):
            raise ScheduleError(f"btype is {short(btype)}; a block is 'forward' or 'backward'")
        self.gid = gid
        self.before: set[Block] = set()
        self.after: set[Block] = set()

    @staticmethod
    def make_dependency(prev: Block, next: Block) -> None:
        """Make `next` depend on `prev`."""
        prev.after.add(next)
        next.before.add(prev)

    def __repr__(self) -> str:
        return f"{self.btype[0]}{self.mid}"


def _whole(name: str, value: object, least: int | None) -> int:
    """Return a whole number of `least` or more (floats that are whole numbers, too), or raise ScheduleError."""
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if not isinstance(number, int) or isinstance(number, bool) or (least is not None and number < least):
        more = "" if least is None else f" of {least} or more"
        raise ScheduleError(f"{name} of a block is {short(value)}; give a whole number{more}")
    return number


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
        numbers = tuple(devices)
        if not numbers or len({*numbers}) != len(numbers) or not all(0 <= device < self.ndevs for device in numbers):
            raise ScheduleError(f"{block}: devices are {numbers}; give one or more of 0 to {self.ndevs - 1}, each once")
        if step < 0:
            raise ScheduleError(f"{block}: step is {step}; steps count from 0")
        if block in self._steps:
            if (self._steps[block], self._devices[block]) != (step, numbers):
                raise ScheduleError(
                    f"{block} is added on devices {numbers} at step {step}, but it already is on "
                    f"{self._devices[block]} at step {self._steps[block]}; make a second Block"
                )
            return
        positions = [self._position(block, device, step) for device in numbers]
        self._steps[block], self._devices[block] = step, numbers
        for device, position in zip(numbers, positions, strict=True):
            self._rows[device].insert(position, block)

    def _position(self, block: Block, device: int, step: int) -> int:
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
        for block, block_devices in zip(blocks, devices, strict=True):
            if block is not None:
                self.add_block(block, block_devices or (), step)
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
            present = [prev for prev in block.before if prev in self._steps]
            if complete and len(present) < len(block.before):
                return False
            if any(self._steps[prev] + prev.span > step for prev in present):
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
        for block, new_block in new.items():
            copied.add_block(new_block, self._devices[block], self._steps[block])
            for prev in block.before & new.keys():
                Block.make_dependency(new[prev], new_block)
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
        repeated = [] if self.repeated is None else [(_gid_of(block), block.mid) for block in self.repeated]
        for (gid, mid), block in blocks.items():
            copies = [(mid, 0)] if mid < middle[gid] else [(mid + more, more)]
            if mid == middle[gid]:
                copies = [(mid + i, i) for i in range(more + 1)]
                repeated += [(gid, new_mid) for new_mid, _ in copies]
            for new_mid, i in copies:
                new[gid, new_mid] = Block(new_mid, block.span, block.memory, block.btype, gid)
                unrolled.add_block(new[gid, new_mid], self.device(block), self.step(block) + i * period)
        connect(new, {gid: {b.gid for b in block.before if b.gid is not None} for (gid, _), block in blocks.items()})
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
            middle[_gid_of(block)] = max(block.mid, middle.get(_gid_of(block), 0))
        absent = {_gid_of(block) for block in self._steps} - middle.keys()
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
        blocks = by_subgraph(self.added_blocks())
        for (gid, _), block in blocks.items():
            model = blocks[gid, 0]
            both = [(b.span, b.memory, b.btype, self._devices[b]) for b in (block, model)]
            if both[0] != both[1]:
                raise ScheduleError(f"{block} of sub-graph {gid} is not like {model}; micro-batches are all alike")
        first = [block for (_, mid), block in blocks.items() if mid == 0]
        task_of = {block: i for i, block in enumerate(first)}
        ends = {(task_of[blocks[gid, 0]], mid): self._steps[b] + b.span for (gid, mid), b in blocks.items()}
        return _plan(placement_of(self, memory, first), ends)

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


# --- sub-graphs, placements and plans ---------------------------------------------------------------------------------


Blocks: TypeAlias = dict[tuple[int, int], Block]  #: by (gid, mid)


def by_subgraph(blocks: Sequence[Block]) -> Blocks:
    """Return the blocks by sub-graph and micro-batch.

    The blocks of a single micro-batch need no gid: each is a sub-graph of its own. Raises ScheduleError if a gid or a
    block is missing, or if a block occurs twice.
    """
    if not blocks:
        raise ScheduleError("the schedule has no blocks; add some")
    if len({block.mid for block in blocks}) == 1 and all(block.gid is None for block in blocks):
        return {(gid, 0): block for gid, block in enumerate(blocks)}
    by_key: Blocks = {}
    for block in blocks:
        key = _gid_of(block), block.mid
        if key in by_key:
            raise ScheduleError(f"there are two blocks {block} of sub-graph {key[0]}; give each sub-graph its own gid")
        by_key[key] = block
    last = max(mid for _, mid in by_key)
    for gid in dict.fromkeys(gid for gid, _ in by_key):
        for mid in range(last + 1):
            if (gid, mid) not in by_key:
                raise ScheduleError(f"sub-graph {gid} has no block for micro-batch {mid} of 0 to {last}; add it")
    return by_key


def _gid_of(block: Block) -> int:
    if block.gid is None:
        raise ScheduleError(f"{block} has no gid; give all blocks of one sub-graph the same number")
    return block.gid


def connect(blocks: Blocks, before: Mapping[int, Iterable[int]]) -> None:
    """Make each sub-graph's blocks depend on those of the sub-graphs `before` it, within their micro-batch."""
    for (gid, mid), block in blocks.items():
        for prev in before[gid]:
            Block.make_dependency(blocks[prev, mid], block)


def placement_of(schedule: SchedPlan, memory: int | None, blocks: Sequence[Block]) -> Placement:
    """Return a placement whose task i is block i, of one micro-batch; `memory` is the limit per device, or None."""
    if not blocks:
        raise ScheduleError("the placement has no blocks; add some")
    index = {block: i for i, block in enumerate(blocks)}
    for block in blocks:
        if absent := next(iter(block.before - index.keys()), None):
            raise ScheduleError(f"{block} depends on {absent}, which is not in the placement; add it")
    edges = [(index[prev], i) for block, i in index.items() for prev in sorted(block.before, key=index.__getitem__)]
    stages = [-1] * len(blocks)
    unmatched = [block for block in blocks if block.btype == "forward"]
    for stage, block in enumerate(unmatched):
        stages[index[block]] = stage
    num_stages = len(unmatched)
    for block in sorted(set(blocks) - set(unmatched), key=lambda block: (schedule.step(block), index[block])):
        ancestors, i = _ancestors(block), index[block]
        forwards = [b for b in unmatched if b in ancestors and schedule.device(b) == schedule.device(block)]
        if forwards:
            forward = max(forwards, key=lambda b: (schedule.step(b), index[b]))
            unmatched.remove(forward)
            stages[i] = stages[index[forward]]
            edges += {(index[forward], i)} - {*edges}
        else:
            stages[i], num_stages = num_stages, num_stages + 1
    tasks = tuple(
        Task(stage, Kind.F if b.btype == "forward" else Kind.B, schedule.device(b), b.span, b.memory)
        for stage, b in zip(stages, blocks, strict=True)
    )
    return Placement(tasks, tuple(Edge(*edge) for edge in edges), Cluster.uniform(schedule.ndevs, memory))


def _ancestors(block: Block) -> set[Block]:
    ancestors: set[Block] = set()
    pending = [block]
    while pending:
        new = pending.pop().before - ancestors
        ancestors |= new
        pending += new
    return ancestors


def _plan(placement: Placement, ends: dict[tuple[int, int], int]) -> Plan:
    """Return the plan in which each (task, micro-batch) ends at a step.

    Rota's pipeline needs a backward of frozen stages, too: it has no duration, and runs after all other ops, where its
    ranks do not wait for each other.
    """
    tasks, edges, num_components = list(placement.tasks), list(placement.edges), placement.num_components
    nmicros, nsteps = 1 + max(mid for _, mid in ends), max(ends.values())
    backward = {task.stage: i for i, task in enumerate(tasks) if task.kind is Kind.B}
    frozen = [stage for stage in placement.stages if backward and stage not in backward]
    for stage in sorted(frozen, key=depth(placement).__getitem__):  # each before those that feed it
        forward = placement.index[stage, Kind.F]
        backward[stage] = len(tasks)
        tasks.append(Task(stage, Kind.B, tasks[forward].ranks, 0))
        sources = [forward, *(backward[b] for a, b in placement.stage_edges if a == stage)]
        edges += [Edge(source, backward[stage]) for source in sources]
        ends |= {(backward[stage], mid): nsteps for mid in range(nmicros)}
    rows: list[list[tuple[int, bool, int, Op]]] = [[] for _ in range(placement.num_ranks)]
    whole = replace(placement, tasks=tuple(tasks), edges=tuple(edges))
    for (i, mid), end in ends.items():
        task = tasks[i]
        op = Op(task.stage, task.kind, mid * num_components + whole.component_of[i])
        for rank in task.ranks:
            rows[rank].append((end - scalar(task.duration_us), task.duration_us != 0, i, op))
    return Plan(whole, nmicros * num_components, tuple(tuple(op for *_, op in sorted(row)) for row in rows))


# --- files ------------------------------------------------------------------------------------------------------------


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
