"""What a pipeline costs and what it runs on: `Costs` of each stage, `Cluster` of ranks and links.

Times are whole microseconds and sizes are whole bytes, rounded once, where they are measured, so that simulator,
checker and solver agree exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise, zip_longest
from operator import add, sub
from typing import Any

from rota import reading
from rota.errors import PlacementError
from rota.units import angle_repr, count_text, limit_text, size_text, time_text


def whole(name: str, value: object, signed: bool = False) -> int:
    """`value` as an int if it is a whole number of 0 or more (any whole number if `signed`).

    Raises:
        PlacementError: It is not such a number; the message calls it `name`.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or (value < 0 and not signed):
        wanted = "a whole number" if signed else "a whole number of 0 or more"
        raise PlacementError(f"{name} is {value!r}: give {wanted} (whole microseconds, whole bytes)")
    return value


def whole_rows(value: object) -> int:
    """The examples of a micro-batch. Raises PlacementError unless it is a whole number of 1 or more."""
    if (found := whole("microbatch_rows", value)) < 1:
        raise PlacementError("microbatch_rows is 0: give the examples of one micro-batch, or None")
    return found


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two ranks.

    A rate is in bytes per µs; 1 GB/s is 1000. None: no time per byte.

    Attributes:
        latency_us: Time before the first byte arrives.
        bytes_per_us: Rate of a message that has the wire to itself. None: unlimited.
        send_us: Compute time that a message costs its sender.
        send_bytes_per_us: Rate at which further compute time of the sender handles the message's bytes.
        receive_us: Compute time that a message costs its receiver.
        receive_bytes_per_us: Rate at which further compute time of the receiver handles the message's bytes.

    Raises:
        PlacementError: A number is negative or not whole, or a rate is 0.
    """

    latency_us: int = 0
    bytes_per_us: int | None = None
    send_us: int = 0
    send_bytes_per_us: int | None = None
    receive_us: int = 0
    receive_bytes_per_us: int | None = None

    def __post_init__(self) -> None:
        for name in ("latency_us", "send_us", "receive_us"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        for name in ("bytes_per_us", "send_bytes_per_us", "receive_bytes_per_us"):
            if (rate := getattr(self, name)) is not None:
                object.__setattr__(self, name, _rate(name, rate))

    def transfer_us(self, num_bytes: int) -> int:
        """Duration of a transfer: latency plus size divided by rate, rounded up."""
        return self.latency_us + _at_rate(num_bytes, self.bytes_per_us)

    def send_cost_us(self, num_bytes: int) -> int:
        """Compute time that a message of this size costs its sender."""
        return self.send_us + _at_rate(num_bytes, self.send_bytes_per_us)

    def receive_cost_us(self, num_bytes: int) -> int:
        """Compute time that a message of this size costs its receiver."""
        return self.receive_us + _at_rate(num_bytes, self.receive_bytes_per_us)

    def to_fields(self) -> list[int | None]:
        """The link in JSON: [latency_us, bytes_per_us], then the costs of sending and receiving if there are any."""
        costs = [self.send_us, self.send_bytes_per_us, self.receive_us, self.receive_bytes_per_us]
        return [self.latency_us, self.bytes_per_us, *(costs if any(costs) else ())]

    @classmethod
    def from_fields(cls, entries: Sequence[reading.Field], where: reading.Field) -> Link:
        """Read what `to_fields` wrote. Raises FormatError."""
        if len(entries) not in (2, 6):
            costs = "send_us, send_bytes_per_us, receive_us, receive_bytes_per_us"
            raise where.wrong(f"latency_us and bytes_per_us, or these with {costs}")
        times = [entry.integer(0) for entry in entries[::2]] + [0, 0]
        rates = [entry.integer_or_none(1) for entry in entries[1::2]] + [None, None]
        return cls(times[0], rates[0], times[1], rates[1], times[2], rates[2])


def _rate(name: str, rate: object) -> int:
    """A rate in bytes per µs. Raises PlacementError if nothing would ever arrive."""
    if (found := whole(name, rate)) == 0:
        raise PlacementError(f"{name} is 0: nothing would arrive; use None for no limit, else 1 or more")
    return found


def _at_rate(num_bytes: int, bytes_per_us: int | None) -> int:
    return -(-num_bytes // bytes_per_us) if bytes_per_us else 0


@dataclass(frozen=True, slots=True)
class SharedLink:
    """What several pairs of ranks share: a host's memory, a network card, a switch. It serves one transfer at a time.

    A transfer uses it if its sender is one of `senders` and its receiver is one of `receivers`.

    Attributes:
        name: What it is, for reports, such as "host node1".
        bytes_per_us: Its rate when it is always busy; 1 GB/s is 1000.
        senders: Ranks.
        receivers: Ranks.

    Raises:
        PlacementError: The rate is not a whole number of 1 or more, or ranks are missing, repeated or invalid.
    """

    name: str
    bytes_per_us: int
    senders: tuple[int, ...]
    receivers: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes_per_us", _rate(f"bytes_per_us of {self.name}", self.bytes_per_us))
        for name in ("senders", "receivers"):
            ranks = tuple(whole(f"a rank in {name} of {self.name}", rank) for rank in getattr(self, name))
            if not ranks or len({*ranks}) != len(ranks):
                raise PlacementError(f"{name} of the shared link {self.name} is {ranks}: give different ranks, from 0")
            object.__setattr__(self, name, ranks)

    def to_fields(self) -> dict[str, Any]:
        """The shared link in JSON."""
        ends = {"senders": list(self.senders), "receivers": list(self.receivers)}
        return {"name": self.name, "bytes_per_us": self.bytes_per_us, **ends}

    @classmethod
    def from_fields(cls, field: reading.Field) -> SharedLink:
        """Read what `to_fields` wrote. Raises FormatError or PlacementError."""
        rate, senders, receivers = field["bytes_per_us"].integer(1), field["senders"], field["receivers"]
        return cls(field["name"].name(), rate, senders.integers(0), receivers.integers(0))


@dataclass(frozen=True, slots=True)
class AllReduceTimes:
    """Measured all-reduces of one number of ranks, while as many groups of ranks as there are do the same.

    Attributes:
        num_ranks: The ranks of a group, 2 or more.
        times_us: (bytes, µs) of one size or more, ascending in bytes. A larger sum takes no less time.

    Raises:
        PlacementError: A number is not whole, or out of order.
    """

    num_ranks: int
    times_us: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_ranks", whole("num_ranks of all-reduces", self.num_ranks))
        whole_numbers = [tuple(whole("a number of all-reduces", number) for number in point) for point in self.times_us]
        object.__setattr__(self, "times_us", tuple(whole_numbers))
        rises = all(a < b and a_us <= b_us for (a, a_us), (b, b_us) in pairwise([(0, 0), *self.times_us]))
        if self.num_ranks < 2 or not self.times_us or not rises:
            raise PlacementError(
                f"all-reduces of {self.num_ranks} ranks take {self.times_us}: give 2 ranks or more, and (bytes, µs) of "
                f"ascending sizes from 1 byte with times that do not fall"
            )

    def __str__(self) -> str:
        """One line, with the times of the smallest and of the largest size."""
        (least, least_us), (most, most_us) = self.times_us[0], self.times_us[-1]
        return (
            f"all-reduces of {count_text(self.num_ranks, 'rank')}: {time_text(least_us)} for {size_text(least)}, "
            f"{time_text(most_us)} for {size_text(most)}"
        )

    __repr__ = angle_repr

    def us(self, num_bytes: int) -> int:
        """The time of a sum: on a line between measured sizes; the smallest's time below, the largest's rate above."""
        points = self.times_us
        for (small, least_us), (large, most_us) in pairwise(points):
            if small < num_bytes <= large:
                return least_us + -(-(most_us - least_us) * (num_bytes - small) // (large - small))
        return points[0][1] if num_bytes <= points[0][0] else -(-points[-1][1] * num_bytes // points[-1][0])

    def to_fields(self) -> dict[str, Any]:
        """The times in JSON."""
        return {"num_ranks": self.num_ranks, "times_us": [list(point) for point in self.times_us]}

    @classmethod
    def from_fields(cls, field: reading.Field) -> AllReduceTimes:
        """Read what `to_fields` wrote. Raises FormatError or PlacementError."""
        points = [point.integers(0) for point in field["times_us"]]
        if any(len(point) != 2 for point in points):
            raise field["times_us"].wrong("a list of [bytes, µs]")
        return cls(field["num_ranks"].integer(2), tuple((point[0], point[1]) for point in points))


@dataclass(frozen=True)
class Cluster:
    """The ranks, their memory, and the links between them.

    Attributes:
        limit_bytes: Memory limit per rank; None: no limit.
        link: The link of every pair of ranks that `links` does not list.
        links: (sender, receiver, Link) of the pairs that differ. The first entry of a pair counts.
        shared: What pairs of ranks share. Empty: transfers never wait for each other.
        gap_us: Time that a rank needs between two ops.
        all_reduces: Measured all-reduces, by ascending number of ranks. They price the sums of replicas' gradients.

    Raises:
        PlacementError: There is no rank, a number is negative or not whole, a link leaves the cluster, or all-reduces
            are not in order.
    """

    limit_bytes: tuple[int | None, ...]
    link: Link = Link()
    links: tuple[tuple[int, int, Link], ...] = ()
    shared: tuple[SharedLink, ...] = ()
    gap_us: int = 0
    all_reduces: tuple[AllReduceTimes, ...] = ()

    def __post_init__(self) -> None:
        if not self.limit_bytes:
            raise PlacementError("limit_bytes is empty: a cluster needs one entry per rank, None for no limit")
        limits = enumerate(self.limit_bytes)
        whole_limits = tuple(None if limit is None else whole(f"limit_bytes[{rank}]", limit) for rank, limit in limits)
        object.__setattr__(self, "limit_bytes", whole_limits)
        object.__setattr__(self, "gap_us", whole("gap_us", self.gap_us))
        for sender, receiver, _ in self.links:
            if not (0 <= sender < self.num_ranks and 0 <= receiver < self.num_ranks):
                raise PlacementError(f"link {sender} -> {receiver} leaves the cluster of {self.num_ranks} ranks")
        for shared in self.shared:
            if (rank := max(*shared.senders, *shared.receivers)) >= self.num_ranks:
                raise PlacementError(
                    f"the shared link {shared.name} has rank {rank}, outside the cluster of {self.num_ranks} ranks"
                )
        numbers = [of.num_ranks for of in self.all_reduces]
        if numbers != sorted({*numbers}) or max(numbers, default=0) > self.num_ranks:
            raise PlacementError(
                f"all_reduces are of {numbers} ranks: give each number once, ascending, up to {self.num_ranks}"
            )

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.limit_bytes)

    @property
    def counts_wires(self) -> bool:
        """Whether transfers share links or cost compute time, or ranks need time between ops."""
        every = (self.link, *(link for *_, link in self.links))
        return bool(self.shared or self.gap_us or any(len(link.to_fields()) > 2 for link in every))

    @classmethod
    def uniform(
        cls, num_ranks: int, limit_bytes: int | None = None, latency_us: int = 0, bytes_per_us: int | None = None
    ) -> Cluster:
        """Equal ranks, and the same link between every pair.

        Args:
            num_ranks: Number of ranks.
            limit_bytes: Memory limit of each rank; None: no limit.
            latency_us: Latency of every link.
            bytes_per_us: Rate of every link; None: unlimited.

        Raises:
            PlacementError: `num_ranks` is below 1, or a number is negative.
        """
        if num_ranks < 1:
            raise PlacementError(f"num_ranks is {num_ranks}: a cluster needs at least 1 rank")
        return cls((limit_bytes,) * num_ranks, Link(latency_us, bytes_per_us))

    def link_between(self, sender: int, receiver: int) -> Link:
        """The link from `sender` to `receiver`."""
        return self._differing.get((sender, receiver), self.link)

    def shared_between(self, sender: int, receiver: int) -> tuple[int, ...]:
        """Indices in `shared` of what a transfer from `sender` to `receiver` uses."""
        sides = enumerate(self._shared_sides)
        return tuple(i for i, (senders, receivers) in sides if sender in senders and receiver in receivers)

    @cached_property
    def _shared_sides(self) -> list[tuple[frozenset[int], frozenset[int]]]:
        return [(frozenset(shared.senders), frozenset(shared.receivers)) for shared in self.shared]

    @cached_property
    def _differing(self) -> Mapping[tuple[int, int], Link]:
        return {(sender, receiver): link for sender, receiver, link in reversed(self.links)}  # the first entry counts

    def __str__(self) -> str:
        """One line."""
        return f"Cluster of {count_text(self.num_ranks, 'rank')}, {limit_text(self.limit_bytes)}"

    __repr__ = angle_repr

    def to_fields(self) -> dict[str, Any]:
        """The fields of a "cluster" in JSON."""
        return {
            "limit_bytes": list(self.limit_bytes),
            "link": self.link.to_fields(),
            "links": [[a, b, *link.to_fields()] for a, b, link in self.links],
            **({"shared": [shared.to_fields() for shared in self.shared]} if self.shared else {}),
            **({"gap_us": self.gap_us} if self.gap_us else {}),
            **({"all_reduces": [of.to_fields() for of in self.all_reduces]} if self.all_reduces else {}),
        }

    @classmethod
    def from_fields(cls, field: reading.Field) -> Cluster:
        """Read what `to_fields` wrote. Raises FormatError or PlacementError."""
        links = []
        for entry in field["links"]:
            numbers = list(entry)
            if len(numbers) < 2:
                raise entry.wrong("[sender, receiver, latency_us, bytes_per_us, …]")
            links.append((numbers[0].integer(0), numbers[1].integer(0), Link.from_fields(numbers[2:], entry)))
        limits = tuple(limit.integer_or_none(0) for limit in field["limit_bytes"])
        shared = tuple(SharedLink.from_fields(each) for each in field["shared"]) if "shared" in field else ()
        gap_us = field["gap_us"].integer(0) if "gap_us" in field else 0
        link = Link.from_fields(list(field["link"]), field["link"])
        all_reduces = (
            tuple(AllReduceTimes.from_fields(each) for each in field["all_reduces"]) if "all_reduces" in field else ()
        )
        return cls(limits, link, tuple(links), shared, gap_us, all_reduces)

    def to_json(self) -> str:
        """The text of a "cluster" file, which `from_json` reads."""
        return reading.dump("cluster", self.to_fields())

    @classmethod
    def from_json(cls, text: str) -> Cluster:
        """Read what `to_json` wrote. Raises FormatError or PlacementError, which name the field."""
        return cls.from_fields(reading.parse(text, "cluster"))


#: States that `rota run --max-restarts` keeps of each rank: one stays whole while the other one is written.
NUM_SNAPSHOTS = 2

_SIGNED = ("input_frees_bytes",)
_OPTIONAL = (  # None has a meaning of its own
    "weight_us",
    "input_frees_bytes",
    "gradient_bytes",
    "recompute_us",
    "spread_us",
    "microbatch_rows",
)


@dataclass(frozen=True, slots=True)
class Costs:
    """Time and memory of each stage.

    Each field has one entry per stage; a single number is used for all of them.

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
        edges: (source, target) stages. None: a chain.
        note: Where the numbers come from.
        microbatch_rows: Examples in the micro-batch whose costs these are. None: unknown.
        spread_us: Interquartile range of the measured times of a stage's ops together. None: unknown.

    Raises:
        PlacementError: A number is negative or not whole, a field has the wrong number of entries, or more bytes are
            freed or kept than a stage has.
    """

    forward_us: tuple[int, ...]
    backward_us: tuple[int, ...]
    weight_us: tuple[int, ...] | None = None
    activation_bytes: tuple[int, ...] = 0  # type: ignore[assignment]  # a number is spread over the stages below
    input_frees_bytes: tuple[int, ...] | None = None
    boundary_bytes: tuple[int, ...] | int = 0
    gradient_bytes: tuple[int, ...] | int | None = None
    forward_peak_bytes: tuple[int, ...] = 0  # type: ignore[assignment]
    backward_peak_bytes: tuple[int, ...] = 0  # type: ignore[assignment]
    weight_peak_bytes: tuple[int, ...] = 0  # type: ignore[assignment]
    static_bytes: tuple[int, ...] = 0  # type: ignore[assignment]
    state_bytes: tuple[int, ...] = 0  # type: ignore[assignment]
    snapshot_bytes: tuple[int, ...] = 0  # type: ignore[assignment]
    reduce_us: tuple[int, ...] = 0  # type: ignore[assignment]
    optimizer_us: tuple[int, ...] = 0  # type: ignore[assignment]
    recompute_us: tuple[int | None, ...] | None = None
    checkpoint_bytes: tuple[int, ...] = 0  # type: ignore[assignment]
    edges: tuple[tuple[int, int], ...] | None = None
    note: str = ""
    microbatch_rows: int | None = None
    spread_us: tuple[int, ...] | None = None

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
            if field.name in ("edges", "note") or (value is None and field.name in _OPTIONAL):
                continue
            if field.name == "microbatch_rows":
                object.__setattr__(self, field.name, whole_rows(value))
                continue
            if field.name in ("boundary_bytes", "gradient_bytes"):
                # A single number stays a number: the edges may be unknown until the stages are placed.
                value = whole(field.name, value) if isinstance(value, int) else _spread(field.name, value, num_edges)
            else:
                gaps, signed = field.name == "recompute_us", field.name in _SIGNED
                value = _spread(field.name, value, len(forward), gaps, signed)
            object.__setattr__(self, field.name, value)
        for stage, (freed, held) in enumerate(zip(self.freed_by_input, self.activation_bytes, strict=True)):
            if freed > held:
                raise PlacementError(
                    f"input_frees_bytes[{stage}] is {freed}, more than activation_bytes[{stage}] = {held}"
                )
        for stage, (kept, held) in enumerate(zip(self.checkpoint_bytes, self.activation_bytes, strict=True)):
            if self.recompute_us is not None and kept > held:
                raise PlacementError(
                    f"checkpoint_bytes[{stage}] is {kept}, more than activation_bytes[{stage}] = {held}"
                )

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
            backward_us=backward_us,  # type: ignore[arg-type]
            weight_us=weight_us,  # type: ignore[arg-type]
            activation_bytes=activation_bytes,  # type: ignore[arg-type]
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
        values: dict[str, Any] = {"edges": tuple(edges)}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple) and field.name != "edges":
                values[field.name] = value * times
        return replace(self, **values)

    def to_json(self) -> str:
        """The text of a "costs" file, one line per field, which `from_json` reads."""
        return reading.dump("costs", {field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def from_json(cls, text: str) -> Costs:
        """Read what `to_json` wrote. Raises FormatError or PlacementError, which name the field."""
        document = reading.parse(text, "costs")
        document.refuse_others(("rota", *(field.name for field in fields(cls))))
        values: dict[str, Any] = {}
        for field in fields(cls):
            if field.name not in document and field.name not in ("forward_us", "backward_us"):
                continue
            entry = document[field.name]
            if entry.value is None:
                values[field.name] = None
            elif field.name == "note":
                values[field.name] = entry.text()
            elif field.name == "microbatch_rows":
                values[field.name] = entry.integer(1)
            elif field.name == "edges":
                values[field.name] = tuple(edge.integers(0) for edge in entry)
            elif field.name == "recompute_us" and isinstance(entry.value, list):
                values[field.name] = tuple(stage.integer_or_none(0) for stage in entry)
            else:
                least = None if field.name in _SIGNED else 0
                values[field.name] = entry.integer(least) if isinstance(entry.value, int) else entry.integers(least)
        return cls(**values)


def _spread(name: str, value: object, count: int, gaps: bool = False, signed: bool = False) -> tuple[int | None, ...]:
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


def assumed_costs(num_stages: int, **given: int) -> Costs:
    """Costs of equal stages: the `given` fields, and assumed values for the others."""
    return Costs.uniform(num_stages, **(ASSUMED_COSTS | given))
