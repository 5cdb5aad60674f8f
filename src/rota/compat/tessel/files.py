"""Schedules as JSON: Tessel's fields, and what it leaves out (dependencies, what is repeated how much later)."""

from __future__ import annotations

import json
import os
from typing import Any

from rota import reading
from rota.compat.tessel.schedule.block import Block
from rota.compat.tessel.schedule.schedplan import SchedPlan
from rota.errors import FormatError, ScheduleError
from rota.reading import Field
from rota.writing import write_text

_MOST_DEVICES, _LARGEST = 10_000, 1_000_000  # of a schedule in a file; the latter of devices times steps


def write(schedule: SchedPlan, filename: str | os.PathLike[str]) -> None:
    blocks = schedule.added_blocks()
    place = {block: i for i, block in enumerate(blocks)}
    repeated = schedule.repeated
    rows: list[dict[str, Any]] = [
        {
            **{name: getattr(block, name) for name in ("mid", "span", "memory", "btype", "gid")},
            "step": schedule.step(block),
            "device": list(schedule.device(block)),
            "before": sorted(place[prev] for prev in block.before if prev in place),
        }
        for block in blocks
    ]
    fields = {
        "ndevs": schedule.ndevs,
        "repetend": schedule.repetend,
        "period": schedule.period,
        "repeated": None if repeated is None else sorted(place[block] for block in repeated),
        "blocks": rows,
    }
    write_text(filename, json.dumps(fields) + "\n")


def read(filename: str | os.PathLike[str]) -> SchedPlan:
    text = reading.read_text(filename)
    try:
        return _schedule(Field("schedule", reading.load(text)))
    except (FormatError, ScheduleError) as error:
        raise FormatError(f"{str(filename)!r}: {error}") from None


def _schedule(document: Field) -> SchedPlan:
    schedule = SchedPlan(document["ndevs"].integer(1, _MOST_DEVICES))
    rows = list(document["blocks"])
    blocks = [_block(row) for row in rows]
    for row, block in zip(rows, blocks, strict=True):
        schedule.add_block(block, row["device"].integers(0), row["step"].integer(0))
        for prev in _optional(row, "before") or ():
            Block.make_dependency(_at(prev, blocks), block)
    if (repetend := document["repetend"]).value is not None:
        bounds = repetend.integers(0)
        if len(bounds) != 2:
            raise repetend.wrong("[first step, step after the last]")
        schedule.repetend = bounds[0], bounds[1]
    if (period := _optional(document, "period")) is not None:
        schedule.period = period.integer(1)
    if (repeated := _optional(document, "repeated")) is not None:
        schedule.repeated = frozenset(_at(place, blocks) for place in repeated)
    if (size := schedule.ndevs * schedule.nsteps) > _LARGEST:
        raise document.wrong(f"{_LARGEST:,} devices times steps at most, not {size:,}")
    return schedule


def _optional(fields: Field, name: str) -> Field | None:
    """Tessel's own files lack some."""
    return fields[name] if name in fields and fields[name].value is not None else None


def _block(row: Field) -> Block:
    gid = _optional(row, "gid")
    number = None if gid is None else gid.integer(0)
    return Block(row["mid"].value, row["span"].value, row["memory"].value, row["btype"].text(), number)


def _at(place: Field, blocks: list[Block]) -> Block:
    i = place.integer(0)
    if i >= len(blocks):
        raise place.wrong(f"the place of one of the {len(blocks)} blocks")
    return blocks[i]
