"""Which call each process makes: agreed on by the first message of a call, which carries all else that is agreed on.

    rank 0   step      ─┐                   ┌─▶ PipelineError: rank 0 calls step(), rank 1 evaluate(); …
    rank 1   evaluate  ─┴─ one all-reduce ──┴─▶ the same, before anything has run

The message is a row of int64, of which each process gets the maxima. It has a place for each process's call and a place
for a number of each process, so that it looks the same whatever is called, and no two calls can be mixed up.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, final

import torch
import torch.distributed as dist

from rota.errors import PipelineError
from rota.runtime.meshes import Processes
from rota.runtime.transport import Transport

_NUM_FLAGS = 5
_MOST_NAMES = 4


class Call(IntEnum):
    """What users call on all ranks at once."""

    STEP = 1
    STEP_WITHOUT_SYNC = 2
    EVALUATE = 3
    FORWARD = 4
    FORWARD_WITHOUT_OUTPUTS = 5
    CLIP_GRAD_NORM = 6
    TIMELINE = 7


_WORDS = {
    Call.STEP: "step()",
    Call.STEP_WITHOUT_SYNC: "step(sync=False)",
    Call.EVALUATE: "evaluate()",
    Call.FORWARD: "forward()",
    Call.FORWARD_WITHOUT_OUTPUTS: "forward()",  # with and without outputs are one call
    Call.CLIP_GRAD_NORM: "clip_grad_norm_()",
    Call.TIMELINE: "timeline()",
}


class Agreed(NamedTuple):
    """The maxima of all processes' `flags`; by process what it calls, and its number."""

    flags: list[int]
    calls: list[Call]
    numbers: list[float]


@final
class Calls:
    """Of one process; `names` tells people which process is which rank."""

    def __init__(self, processes: Processes, transport: Transport) -> None:
        self._names, self._transport = processes.names, transport
        self._mine = dist.get_rank()

    def agree(self, call: Call, doing: str, flags: Sequence[int] = (), number: float = 0.0) -> Agreed:
        """What all processes tell. Collective. `doing` is told where a rank got lost.

        Args:
            call: what this process calls.
            doing: for people.
            flags: whole numbers of 64 bits, at most five, of which the greatest counts.
            number: one of 0 or more, inf or nan, which all others get as it is.

        Raises:
            PipelineError: on all processes, unless all make the same call.
        """
        size = len(self._names)
        row = [0] * (_NUM_FLAGS + 2 * size)
        row[: len(flags)] = flags
        row[_NUM_FLAGS + self._mine] = int(call)
        row[_NUM_FLAGS + size + self._mine] = _to_bits(number)
        told = torch.tensor(row)
        self._transport.all_reduce(told, dist.ReduceOp.MAX, doing)
        row = told.tolist()
        calls = [Call(code) for code in row[_NUM_FLAGS : _NUM_FLAGS + size]]
        self._refuse_differences(calls)
        return Agreed(row[: len(flags)], calls, [*map(_to_float, row[_NUM_FLAGS + size :])])

    def _refuse_differences(self, calls: list[Call]) -> None:
        if len({*calls}) == 1:
            return
        by_word: dict[str, list[str]] = {}
        for name, call in zip(self._names, calls, strict=True):
            by_word.setdefault(_WORDS[call], []).append(name)
        if len(by_word) > 1:
            told = "; ".join(
                f"{listed(names)} {'calls' if len(names) == 1 else 'call'} {word}" for word, names in by_word.items()
            )
            raise PipelineError(
                f"the ranks make different calls at once: {told}; make the same calls in the same order on all ranks"
            )


def listed(names: Sequence[str]) -> str:
    """For people: "rank 0, rank 1 and 7 more"."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _to_bits(number: float) -> int:
    """Numbers of 0 or more are ordered as their bits are, and nan is above them all."""
    bits: int = struct.unpack("<q", struct.pack("<d", abs(number)))[0]
    return bits


def _to_float(bits: int) -> float:
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return number
