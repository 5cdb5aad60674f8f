"""What a placement is made of: kinds of work, tasks and the edges between them; and ops, the tasks of one micro-batch.

Durations and sizes are whole numbers, or `PerClass` where micro-batches differ: one number per class of them. `Op` is
a named tuple, not a dataclass, because plans hold hundreds of thousands of them, also as dictionary keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import NamedTuple, TypeAlias

from rota.core.errors import FormatError, PlacementError
from rota.core.reading import whole


@dataclass(frozen=True, slots=True)
class PerClass:
    """A duration or a size that is not the same for all classes of micro-batches.

    Attributes:
        values: [num_classes]: the number of each class.

    Raises:
        PlacementError: There is no number.
    """

    values: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values))
        if not self.values:
            raise PlacementError("an amount per class of micro-batches has no number; give one per class")

    def __bool__(self) -> bool:
        raise TypeError(f"{self!r} is neither 0 nor another number: read one from placement.for_microbatch(microbatch)")


#: A duration or a size of a task, an edge or a route: one number, or one number per class of micro-batches.
Amount: TypeAlias = int | PerClass


def by_class(function: Callable[..., int], *amounts: Amount) -> Amount:
    """`function` of amounts, class by class."""
    if not any(isinstance(amount, PerClass) for amount in amounts):
        return function(*amounts)
    num_classes = max(len(values_of(amount)) for amount in amounts)
    return amount_of(function(*(value_in(amount, c) for amount in amounts)) for c in range(num_classes))


def amount_of(values: Iterable[int]) -> Amount:
    """The amount with one number per class: an int where all are the same."""
    values = tuple(values)
    return values[0] if len({*values}) == 1 else PerClass(values)


def values_of(amount: Amount) -> tuple[int, ...]:
    """All numbers of an amount: one, or one per class."""
    return amount.values if isinstance(amount, PerClass) else (amount,)


def value_in(amount: Amount, class_: int) -> int:
    """An amount's number for one class."""
    return amount.values[class_] if isinstance(amount, PerClass) else amount


def scalar(amount: Amount) -> int:
    """The number of micro-batches that are all alike. Raises TypeError if there is one per class."""
    if isinstance(amount, PerClass):
        raise TypeError(f"micro-batches differ: {amount}; read one number from placement.for_microbatch(microbatch)")
    return amount


class Kind(StrEnum):
    """What an op computes, in the letters of PyTorch's schedule CSV."""

    F = "F"  #: forward
    B = "B"  #: backward: gradients of inputs and weights together
    I = "I"  # noqa: E741  #: gradients of the inputs only
    W = "W"  #: gradients of the weights only
    R = "R"  #: recompute: forward once more, for activations that were not kept
    O = "O"  # noqa: E741  #: offload: activations that have been copied to the host leave the device
    L = "L"  #: load: memory for what was offloaded, and the start of its copy back

    __hash__ = str.__hash__  # that of enumerations is written in Python: dictionaries by op would be slow

    @property
    def makes_weight_gradients(self) -> bool:
        """Whether ops of this kind make weight gradients: B and W."""
        return self in (Kind.B, Kind.W)

    @property
    def is_copy(self) -> bool:
        """Whether ops of this kind compute nothing, but end or begin a copy between a rank and its host: O and L."""
        return self in (Kind.O, Kind.L)

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
    Kind.O: "offload",
    Kind.L: "load",
}

_OP = re.compile(r"(\d{1,9})([FBIWROL])(\d{1,9})", re.ASCII)


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
                f"{text.strip()[:40]!r} is not an op: write stage, one of F B I W R O L, and micro-batch, such as 2F0"
            )
        stage, kind, microbatch = match.groups()
        return cls(int(stage), Kind(kind), int(microbatch))


def parse_ops(words: Iterable[str], where: str) -> tuple[Op, ...]:
    """Read one op per word. Raises FormatError, which names `where` and the number of the word."""
    ops = []
    for number, word in enumerate(words, 1):
        try:
            ops.append(Op.parse(word))
        except FormatError as error:
            raise FormatError(f"{where} {number}: {error}") from None
    return tuple(ops)


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
    duration_us: Amount
    held_bytes: Amount = 0
    peak_bytes: Amount = 0

    def __post_init__(self) -> None:
        if self.stage < 0:
            raise PlacementError(f"task {self}: stage {self.stage} is negative; stages count from 0")
        if not self.ranks or len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise PlacementError(f"task {self}: ranks {self.ranks} must be one or more different ranks, counted from 0")
        for name in ("duration_us", "held_bytes", "peak_bytes"):
            checked = partial(whole, f"{name} of task {self}", signed=name == "held_bytes")
            object.__setattr__(self, name, by_class(checked, getattr(self, name)))

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}"


class Edge(NamedTuple):
    """The task with index `target` reads `num_bytes` of the output of the task with index `source`."""

    source: int
    target: int
    num_bytes: Amount = 0


class Route(NamedTuple):
    """The transfer of an edge to one of its target's ranks: from rank `sender` to rank `receiver`.

    It takes `duration_us` if it never waits. For the first `service_us` of these it occupies the shared links with the
    indices `shared` in the cluster, all of them at once. Its `num_bytes` are held on both ranks. A copy between a rank
    and its host has this rank as both ends, and 0 bytes: its tasks hold what it copies.
    """

    source: int
    target: int
    sender: int
    receiver: int
    num_bytes: Amount
    duration_us: Amount
    service_us: Amount = 0
    shared: tuple[int, ...] = ()

    @property
    def is_copy(self) -> bool:
        """Whether it is a copy between a rank and its host."""
        return self.sender == self.receiver


@dataclass(frozen=True, slots=True)
class StepEnd:
    """What follows a stage's last gradient, on each of its ranks.

    Attributes:
        stage: The stage.
        reduce_us: Duration of the reduction of gradients over replicas.
        optimizer_us: Duration of the optimizer step, which comes after it.
    """

    stage: int
    reduce_us: int
    optimizer_us: int

    def __post_init__(self) -> None:
        for name in ("reduce_us", "optimizer_us"):
            object.__setattr__(self, name, whole(f"{name} of stage {self.stage}", getattr(self, name)))
