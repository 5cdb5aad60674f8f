"""What a pipeline costs: `Costs` of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import zip_longest
from operator import add, sub
from typing import Any

from rota.core import reading
from rota.core.errors import PlacementError
from rota.core.reading import Positive, Signed, Whole, whole, whole_rows
from rota.core.text import angle_repr, count_text, time_text

#: States that `rota run --max-restarts` keeps of each rank: one stays whole while the other one is written.
NUM_SNAPSHOTS = 2


@dataclass(frozen=True, slots=True)
class Costs:
    """Time and memory of each stage.

    Each field has one entry per stage; it is 0 for all of them if there is none. In Python, a single number is used for
    all stages.

    Attributes:
        forward_us: Time of F.
        backward_us: Time of B, or of I if the backward is split.
        weight_us: Time of W. None: the backward is not split.
        activation_bytes: Bytes that F holds for the backward.
        input_frees_bytes: Bytes of these that I frees; W frees the rest. Negative if I keeps gradients for W that need
            more. None: half. Without a split, B frees all.
        boundary_bytes: Bytes sent forward, one entry per edge.
        gradient_bytes: Bytes sent backward, one entry per edge. None: as `boundary_bytes`.
        forward_peak_bytes: Additional bytes while F runs.
        backward_peak_bytes: Additional bytes while B or I runs.
        weight_peak_bytes: Additional bytes while W runs.
        static_bytes: Bytes that are always held: parameters, gradients, optimizer state.
        state_bytes: Of these, what a checkpoint holds: parameters, buffers, optimizer state. 0: unknown.
        snapshot_bytes: Of the static bytes, those for the states that `rota run --max-restarts` keeps in memory. 0: not
            counted, see `with_snapshots`.
        reduce_us: Time to reduce the gradients over replicas at the end of a step.
        optimizer_us: Time of the optimizer step.
        recompute_us: Time of R, which makes the activations again before the backward; None for a stage that keeps its
            activations. None for all: no stage recomputes.
        checkpoint_bytes: Bytes that F holds if the stage recomputes.
        offload_bytes: Bytes of what F holds that are copied to the host after it, and back before the backward.
        edges: (source, target) stages. None: a chain.
        note: Where the numbers come from.
        microbatch_rows: Examples in the micro-batch whose costs these are. None: unknown.
        spread_us: Interquartile range of the measured times of a stage's ops together. None: unknown.

    Raises:
        PlacementError: A number is negative or not whole, a field has the wrong number of entries, or more bytes are
            freed or kept than a stage has.
    """

    forward_us: tuple[Whole, ...]
    backward_us: tuple[Whole, ...]
    weight_us: tuple[Whole, ...] | None = None
    activation_bytes: tuple[Whole, ...] = ()
    input_frees_bytes: tuple[Signed, ...] | None = None
    boundary_bytes: tuple[Whole, ...] | Whole = 0
    gradient_bytes: tuple[Whole, ...] | Whole | None = None
    forward_peak_bytes: tuple[Whole, ...] = ()
    backward_peak_bytes: tuple[Whole, ...] = ()
    weight_peak_bytes: tuple[Whole, ...] = ()
    static_bytes: tuple[Whole, ...] = ()
    state_bytes: tuple[Whole, ...] = ()
    snapshot_bytes: tuple[Whole, ...] = ()
    reduce_us: tuple[Whole, ...] = ()
    optimizer_us: tuple[Whole, ...] = ()
    recompute_us: tuple[Whole | None, ...] | None = None
    checkpoint_bytes: tuple[Whole, ...] = ()
    offload_bytes: tuple[Whole, ...] = ()
    edges: tuple[tuple[Whole, Whole], ...] | None = None
    note: str = ""
    microbatch_rows: Positive | None = None
    spread_us: tuple[Whole, ...] | None = None

    def __post_init__(self) -> None:
        forward: object = self.forward_us
        if not isinstance(forward, Sequence) or not forward:
            raise PlacementError(
                f"forward_us is {forward!r}: give one time per stage, or use Costs.uniform(num_stages)"
            )
        edges = self.edges
        if edges is not None:
            if any(len(edge) != 2 for edge in edges):
                raise PlacementError(f"edges is {edges!r}: give (source, target) pairs of stages")
            edges = tuple((whole("edges", a), whole("edges", b)) for a, b in edges)
            object.__setattr__(self, "edges", edges)
        num_edges = len(forward) - 1 if edges is None else len(edges)
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default == ():
                value = 0
            if field.name in ("edges", "note") or value is field.default is None:  # None has a meaning of its own
                continue
            if field.name == "microbatch_rows":
                object.__setattr__(self, field.name, whole_rows(value))
                continue
            if field.name in ("boundary_bytes", "gradient_bytes"):
                # A single number stays a number: the edges may be unknown until the stages are placed.
                value = whole(field.name, value) if isinstance(value, int) else _column(field.name, value, num_edges)
            else:
                gaps, signed = field.name == "recompute_us", field.name == "input_frees_bytes"
                value = _column(field.name, value, len(forward), gaps, signed)
            object.__setattr__(self, field.name, value)
        parts = {"input_frees_bytes": self.freed_by_input}
        if self.recompute_us is not None:
            parts["checkpoint_bytes"] = self.checkpoint_bytes
        for stage, (part, kept) in enumerate(zip(self.offload_bytes, self.kept_bytes, strict=True)):
            if part > kept:
                raise PlacementError(f"offload_bytes[{stage}] is {part}, but F of this stage holds {kept}")
        for name, column in parts.items():
            for stage, (part, held) in enumerate(zip(column, self.activation_bytes, strict=True)):
                if part > held:
                    raise PlacementError(f"{name}[{stage}] is {part}, more than activation_bytes[{stage}] = {held}")

    def __str__(self) -> str:
        """One line."""
        times = f"F {time_text(sum(self.forward_us))}, B {time_text(sum(self.backward_us))}"
        return f"Costs of {count_text(self.num_stages, 'stage')}: {times} per micro-batch in all"

    __repr__ = angle_repr

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.forward_us)

    @property
    def freed_by_input(self) -> tuple[int, ...]:
        """Bytes of each stage's activations that I frees; by default half of them."""
        return self.input_frees_bytes or tuple(held // 2 for held in self.activation_bytes)

    @property
    def kept_bytes(self) -> tuple[int, ...]:
        """Bytes that each stage's F holds: its activations, or the checkpoint of a stage that recomputes."""
        recompute = self.recompute_us or (None,) * self.num_stages
        parts = zip(recompute, self.activation_bytes, self.checkpoint_bytes, strict=True)
        return tuple(held if us is None else checkpoint for us, held, checkpoint in parts)

    @property
    def spread(self) -> float:
        """The largest `spread_us` of a stage, as a part of the time of its ops; 0.0 if it is unknown."""
        columns = self.forward_us, self.backward_us, self.weight_us, self.recompute_us
        times_us = [sum(us or 0 for us in stage) for stage in zip(*filter(None, columns), strict=True)]
        return max((a / b for a, b in zip(self.spread_us or (), times_us, strict=False) if b), default=0.0)

    def as_chain(self) -> Costs:
        """The same costs without edges. Raises PlacementError unless the edges are those of a chain."""
        if self.edges is None:
            return self
        chain = [(stage, stage + 1) for stage in range(self.num_stages - 1)]
        for i, (edge, expected) in enumerate(zip_longest(self.edges, chain)):
            if edge != expected:
                raise PlacementError(
                    f"edges[{i}] of the costs is {edge or 'missing'}, but this needs a chain, with "
                    f"{expected or 'nothing'} there; for other graphs use rota.place, then gpipe or 1f1b"
                )
        return replace(self, edges=None)

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        forward_us: int = 1,
        backward_us: int = 2,
        weight_us: int | None = None,
        activation_bytes: int = 1,
        boundary_bytes: int = 0,
        **others: Any,
    ) -> Costs:
        """The same costs for each stage.

        Args:
            num_stages: Number of stages.
            forward_us: Time of F.
            backward_us: Time of B, or of I if `weight_us` is given.
            weight_us: Time of W; None: the backward is not split.
            activation_bytes: Bytes that F holds until the backward.
            boundary_bytes: Bytes that one stage sends to the next, and gradients back.
            **others: The other fields of Costs.

        Raises:
            PlacementError: `num_stages` is below 1, or a number is negative or not whole.
        """
        if num_stages < 1:
            raise PlacementError(f"num_stages is {num_stages}: a pipeline needs at least 1 stage")
        return cls(
            forward_us=(forward_us,) * num_stages,
            backward_us=(backward_us,) * num_stages,
            weight_us=None if weight_us is None else (weight_us,) * num_stages,
            activation_bytes=(activation_bytes,) * num_stages,
            boundary_bytes=boundary_bytes,
            **others,
        )

    def with_split_backward(self) -> Costs:
        """The same costs with a whole backward halved into I and W; unchanged if it is split already."""
        if self.weight_us is not None:
            return self
        weight = tuple(us // 2 for us in self.backward_us)
        inputs = tuple(us - w for us, w in zip(self.backward_us, weight, strict=True))
        return replace(self, backward_us=inputs, weight_us=weight)

    def with_snapshots(self) -> Costs:
        """The same costs with the states that `rota run --max-restarts` keeps in memory, `NUM_SNAPSHOTS` per stage.

        Raises PlacementError if `state_bytes` are unknown.
        """
        if not any(self.state_bytes):
            raise PlacementError(
                "the costs have no state_bytes, which say what snapshots need; measure them again, with rota.profile"
            )
        snapshots = tuple(NUM_SNAPSHOTS * size for size in self.state_bytes)
        without = map(sub, self.static_bytes, self.snapshot_bytes)
        return replace(self, static_bytes=tuple(map(add, without, snapshots)), snapshot_bytes=snapshots)

    def repeated(self, times: int, edges: Sequence[tuple[int, int]]) -> Costs:
        """Copies of the same stages, connected by `edges`; a chain's boundary sizes are repeated for each copy."""
        columns = {name: column for name, column in asdict(self).items() if isinstance(column, tuple)}
        values: dict[str, Any] = {name: column * times for name, column in columns.items()} | {"edges": tuple(edges)}
        return replace(self, **values)

    def to_json(self) -> str:
        """The text of a "costs" file, one line per field, which `from_json` reads."""
        return reading.dump("costs", asdict(self), Costs.from_json)

    @classmethod
    def from_json(cls, text: str) -> Costs:
        """Read what `to_json` wrote. Raises FormatError or PlacementError, which name the field."""
        return reading.parse(text, "costs").read(cls)


def _column(name: str, value: object, count: int, gaps: bool = False, signed: bool = False) -> tuple[int | None, ...]:
    """A tuple with `count` entries from one number or a sequence; `gaps` allows None, `signed` numbers below 0."""
    if not isinstance(value, Sequence):
        return (whole(name, value, signed),) * count
    if len(value) != count:
        raise PlacementError(f"{name} has {len(value)} entries for {count}; give {count}, or a single number for all")
    return tuple(
        entry if gaps and entry is None else whole(f"{name}[{i}]", entry, signed) for i, entry in enumerate(value)
    )


#: Assumed of a stage whose costs are unknown: large enough to be divided among stages without rounding.
ASSUMED_COSTS = {"forward_us": 1000, "backward_us": 2000, "activation_bytes": 1000}


def assumed_costs(num_stages: int, **costs: int) -> Costs:
    """Costs of equal stages: these fields, and assumed values for the others."""
    return Costs.uniform(num_stages, **(ASSUMED_COSTS | costs))
