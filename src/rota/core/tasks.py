"""Kinds of work, tasks (the work of every micro-batch on one stage), ops (a task of one micro-batch), and transfers.

`Op` is a named tuple, not a dataclass, because plans hold hundreds of thousands of them, also as dictionary keys.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import NamedTuple

from rota.core.errors import FormatError, PlacementError
from rota.core.figures import each
from rota.core.whole_numbers import whole


class Kind(StrEnum):
    """What an op computes, in the letters of PyTorch's schedule CSV."""

    F = "F"  #: forward
    B = "B"  #: backward: gradients of inputs and weights together
    I = "I"  # noqa: E741  #: gradients of the inputs only
    W = "W"  #: gradients of the weights only
    R = "R"  #: recompute: forward once more, for activations that were not kept

    __hash__ = str.__hash__  # that of enumerations is written in Python: dictionaries by op would be slow

    @property
    def makes_weight_gradients(self) -> bool:
        """Whether ops of this kind make weight gradients: B and W."""
        return self in (Kind.B, Kind.W)

    @property
    def word(self) -> str:
        """What reports and legends call it."""
        return _WORDS[self]


_WORDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.R: "recompute",
}

_OP = re.compile(r"(\d{1,9})([FBIWR])(\d{1,9})", re.ASCII)


class Op(NamedTuple):
    """A task of one micro-batch. `str(Op(2, Kind.F, 0)) == "2F0"`, as in PyTorch's schedule CSV.

    Attributes:
        stage: The stage, counted from 0.
        kind: What the op computes.
        microbatch: The micro-batch, counted from 0.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Op:
        """Read "2F0". Raises FormatError for anything else."""
        match = _OP.fullmatch(text.strip())
        if match is None:
            raise FormatError(
                f"{text.strip()[:40]!r} is not an op: write stage, one of F B I W R, and micro-batch, such as 2F0"
            )
        stage, kind, microbatch = match.groups()
        return cls(int(stage), Kind(kind), int(microbatch))


class Transfer(NamedTuple):
    """The transfer of the output of op `source` from rank `sender` to rank `receiver`, where op `target` reads it."""

    source: Op
    target: Op
    sender: int
    receiver: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.source}→{self.target}"


@dataclass(frozen=True, slots=True)
class Task:
    """The work of every micro-batch for one (stage, kind).

    Where micro-batches differ, `duration_us`, `held_bytes` and `peak_bytes` may be `rota.core.figures.PerClass`: one
    number per class of micro-batches.

    Attributes:
        stage: The stage, counted from 0.
        kind: What the task computes.
        ranks: The ranks that run it together: usually one; several for a tensor-parallel task.
        duration_us: How long it runs; 0 is allowed.
        held_bytes: Bytes that stay on each rank after it; a negative number frees bytes.
        peak_bytes: Additional bytes on each rank while it runs.

    Raises:
        PlacementError: A number is negative or not whole, or `ranks` is empty or names a rank twice.
    """

    stage: int
    kind: Kind
    ranks: tuple[int, ...]
    duration_us: int
    held_bytes: int = 0
    peak_bytes: int = 0

    def __post_init__(self) -> None:
        if self.stage < 0:
            raise PlacementError(f"task {self}: stage {self.stage} is negative; stages count from 0")
        if not self.ranks or len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise PlacementError(f"task {self}: ranks {self.ranks} must be one or more different ranks, counted from 0")
        for name in ("duration_us", "peak_bytes"):
            object.__setattr__(self, name, each(partial(whole, f"{name} of task {self}"), getattr(self, name)))
        object.__setattr__(self, "held_bytes", each(self._whole_held_bytes, self.held_bytes))

    def _whole_held_bytes(self, value: object) -> int:
        if not isinstance(value, int):
            raise PlacementError(f"held_bytes of task {self} is {value!r}: give a whole number of bytes")
        return value

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}"
