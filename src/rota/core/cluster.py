"""What a pipeline runs on: a `Cluster` of ranks, with the links between them and the memory of each.

Times are whole microseconds and sizes are whole bytes, rounded once, where they are measured, so that simulator,
checker and solver agree exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Annotated, TypeAlias

import msgspec

from rota.core import reading
from rota.core.errors import PlacementError
from rota.core.reading import Name, Positive, Whole, whole
from rota.core.text import angle_repr, count_text, limit_text, size_text, time_text

#: One end of a link: the memory of a rank's machine, to which activations are offloaded. The other ends are ranks.
HOST = -1
End: TypeAlias = Annotated[int, msgspec.Meta(ge=HOST)]


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two ranks.

    A rate is in bytes per µs; 1 GB/s is 1000. None: no time per byte.

    Attributes:
        latency_us: Time before the first byte arrives.
        bytes_per_us: Rate of a message that has the wire to itself. None: unlimited.

    Raises:
        PlacementError: A number is negative or not whole, or a rate is 0.
    """

    latency_us: int = 0
    bytes_per_us: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "latency_us", whole("latency_us", self.latency_us))
        if self.bytes_per_us is not None:
            object.__setattr__(self, "bytes_per_us", _rate("bytes_per_us", self.bytes_per_us))

    def transfer_us(self, num_bytes: int) -> int:
        """Duration of a transfer: latency plus size divided by rate, rounded up."""
        return self.latency_us + (-(-num_bytes // self.bytes_per_us) if self.bytes_per_us else 0)


def _rate(name: str, value: object) -> int:
    """A rate in bytes per µs. Raises PlacementError if nothing would ever arrive."""
    if (rate := whole(name, value)) == 0:
        raise PlacementError(f"{name} is 0: nothing would arrive; use None for no limit, else 1 or more")
    return rate


@dataclass(frozen=True, slots=True)
class SharedLink:
    """What several pairs of ranks share: a host's memory, a network card, a switch. It serves one transfer at a time.

    A transfer uses it if its sender is one of `senders` and its receiver is one of `receivers`. Copies of activations
    go from a rank to `HOST` and back.

    Attributes:
        name: What it is, for reports, such as "host node1".
        bytes_per_us: Its rate when it is always busy; 1 GB/s is 1000.
        senders: Ranks, or `HOST`.
        receivers: Ranks, or `HOST`.

    Raises:
        PlacementError: The rate is not a whole number of 1 or more, or ranks are missing, repeated or invalid.
    """

    name: Name
    bytes_per_us: Positive
    senders: tuple[End, ...]
    receivers: tuple[End, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes_per_us", _rate(f"bytes_per_us of {self.name}", self.bytes_per_us))
        for name in ("senders", "receivers"):
            ranks = tuple(
                HOST if rank == HOST else whole(f"a rank in {name} of {self.name}", rank)
                for rank in getattr(self, name)
            )
            if not ranks or len({*ranks}) != len(ranks):
                raise PlacementError(f"{name} of the shared link {self.name} is {ranks}: give different ranks, from 0")
            object.__setattr__(self, name, ranks)


@dataclass(frozen=True, slots=True)
class AllReduceTimes:
    """Measured all-reduces of one number of ranks, while as many groups of ranks as there are do the same.

    Attributes:
        num_ranks: The ranks of a group, 2 or more.
        times_us: (bytes, µs) of one size or more, ascending in bytes. A larger sum takes no less time.

    Raises:
        PlacementError: A number is not whole, or out of order.
    """

    num_ranks: Whole
    times_us: tuple[tuple[Whole, Whole], ...]

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


@dataclass(frozen=True)
class Cluster:
    """The ranks, their memory, and the links between them.

    Attributes:
        limit_bytes: Memory limit per rank; None: no limit.
        link: The link of every pair of ranks that `links` does not list.
        links: (sender, receiver, Link) of the pairs that differ. The first entry of a pair counts.
        shared: What pairs of ranks share. Empty: transfers never wait for each other.
        all_reduces: Measured all-reduces, by ascending number of ranks. They price the sums of replicas' gradients.

    Raises:
        PlacementError: There is no rank, a number is negative or not whole, a link leaves the cluster, or all-reduces
            are not in order.
    """

    limit_bytes: tuple[int | None, ...]
    link: Link = Link()
    links: tuple[tuple[int, int, Link], ...] = ()
    shared: tuple[SharedLink, ...] = ()
    all_reduces: tuple[AllReduceTimes, ...] = ()

    def __post_init__(self) -> None:
        if not self.limit_bytes:
            raise PlacementError("limit_bytes is empty: a cluster needs one entry per rank, None for no limit")
        limits = enumerate(self.limit_bytes)
        whole_limits = tuple(None if limit is None else whole(f"limit_bytes[{rank}]", limit) for rank, limit in limits)
        object.__setattr__(self, "limit_bytes", whole_limits)
        for sender, receiver, _ in self.links:
            if not (HOST <= sender < self.num_ranks and HOST <= receiver < self.num_ranks):
                raise PlacementError(f"link {sender} -> {receiver} leaves the cluster of {self.num_ranks} ranks")
        for shared in self.shared:
            if (rank := max(*shared.senders, *shared.receivers)) >= self.num_ranks:
                raise PlacementError(
                    f"the shared link {shared.name} has rank {rank}, outside the cluster of {self.num_ranks} ranks"
                )
        numbers = [measured.num_ranks for measured in self.all_reduces]
        if numbers != sorted({*numbers}) or max(numbers, default=0) > self.num_ranks:
            raise PlacementError(
                f"all_reduces are of {numbers} ranks: give each number once, ascending, up to {self.num_ranks}"
            )

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.limit_bytes)

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

    def with_host_links(self, bytes_per_us: int, ranks_per_link: int = 1) -> Cluster:
        """The same ranks with links to their hosts' memory and back, for activations that are offloaded.

        Args:
            bytes_per_us: The rate of a link in each direction; 1 GB/s is 1000.
            ranks_per_link: How many ranks, one after the other, share a link. Default: each has its own.

        Raises:
            PlacementError: A number is not 1 or more.
        """
        if whole("ranks_per_link", ranks_per_link) < 1:
            raise PlacementError("ranks_per_link is 0: each link needs a rank; give 1 or more")
        links = list[SharedLink]()
        for first in range(0, self.num_ranks, ranks_per_link):
            ranks = tuple(range(first, min(first + ranks_per_link, self.num_ranks)))
            name = f"rank {first}" if len(ranks) == 1 else f"ranks {first} to {ranks[-1]}"
            links.append(SharedLink(f"{name} to host", bytes_per_us, ranks, (HOST,)))
            links.append(SharedLink(f"host to {name}", bytes_per_us, (HOST,), ranks))
        return replace(self, shared=(*self.shared, *links))

    def with_free_transfers(self) -> Cluster:
        """The same ranks, whose transfers to each other take no time; copies to and from their hosts do."""
        to_hosts = tuple(link for link in self.shared if HOST in (*link.senders, *link.receivers))
        return replace(self, link=Link(), links=(), shared=to_hosts)

    def link_between(self, sender: int, receiver: int) -> Link:
        """The link from `sender` to `receiver`; one of them may be `HOST`."""
        return self._differing.get((sender, receiver), Link() if HOST in (sender, receiver) else self.link)

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

    def to_file(self) -> ClusterFile:
        """The cluster as it is in JSON."""
        links = tuple((a, b, link.latency_us, link.bytes_per_us) for a, b, link in self.links)
        link = self.link.latency_us, self.link.bytes_per_us
        return ClusterFile(self.limit_bytes, link, links, self.shared, self.all_reduces)

    @classmethod
    def from_file(cls, file: ClusterFile) -> Cluster:
        """What `to_file` wrote. Raises PlacementError."""
        links = tuple((a, b, Link(latency, rate)) for a, b, latency, rate in file.links)
        return cls(file.limit_bytes, Link(*file.link), links, file.shared, file.all_reduces)

    def to_json(self) -> str:
        """The text of a "cluster" file, which `from_json` reads."""
        return reading.dump("cluster", self.to_file(), Cluster.from_json)

    @classmethod
    def from_json(cls, text: str) -> Cluster:
        """Read what `to_json` wrote. Raises FormatError or PlacementError, which name the field."""
        return cls.from_file(reading.parse(text, "cluster").read(ClusterFile))


class ClusterFile(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A cluster in JSON: links are rows of sender, receiver, latency_us and bytes_per_us."""

    limit_bytes: tuple[Whole | None, ...]
    link: tuple[Whole, Positive | None]
    links: tuple[tuple[End, End, Whole, Positive | None], ...]
    shared: tuple[SharedLink, ...] = ()
    all_reduces: tuple[AllReduceTimes, ...] = ()
