"""The machine of a plan: processes, their memory and speed, and the links between them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rota.costs import Cluster, Link, SharedLink, whole
from rota.errors import PlacementError
from rota.units import angle_repr, count_text, limit_text

_ANY_LINK = Link()  # infinitely fast
_MOST_RANKS = 100_000  # more than any machine has; the time to look at a layout grows with them


@dataclass(frozen=True, slots=True)
class Machine:
    """The processes that a plan may use, all or some of them, numbered as in `rota.mesh`.

    Rank r of replica k, of pipelines on p ranks, is process k · p + r.

    Attributes:
        num_ranks: The number of processes.
        limit_bytes: Maximum bytes that a process may hold: one number, or one per process (None: no limit).
        link: The link between processes of a node; or a Cluster with the links of all pairs, as measured by
            `rota.profiling.measure_links`, and maybe limits.
        ranks_per_node: Number of neighbouring processes on one node (None: all).
        node_link: The link between processes of different nodes (None: `link`).
        slowdowns: The factor of each process's times (empty: 1).
        all_reduces: Measured sums over processes, as by `rota.profiling.all_reduces`, by number of processes: (bytes,
            µs) of several sizes. They replace times computed from the links.

    Raises:
        PlacementError: A value is invalid, or contradicts another one.
    """

    num_ranks: int
    limit_bytes: tuple[int | None, ...] | int | None = None
    link: Link | Cluster = _ANY_LINK
    ranks_per_node: int | None = None
    node_link: Link | None = None
    slowdowns: tuple[float, ...] = ()
    all_reduces: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if whole("num_ranks", self.num_ranks) < 1:
            raise PlacementError(f"num_ranks is {self.num_ranks}: a machine has at least 1")
        if self.num_ranks > _MOST_RANKS:
            raise PlacementError(
                f"num_ranks is {self.num_ranks:,}, more than any machine has; give {_MOST_RANKS:,} at most"
            )
        if isinstance(self.link, Cluster):
            self._take(self.link)
        one = self.limit_bytes
        limits = one if isinstance(one, tuple) else (one,) * self.num_ranks
        object.__setattr__(self, "limit_bytes", Cluster(limits).limit_bytes)  # which looks at each of them
        object.__setattr__(self, "slowdowns", tuple(self.slowdowns) or (1.0,) * self.num_ranks)
        for name in ("limit_bytes", "slowdowns"):
            if (count := len(getattr(self, name))) != self.num_ranks:
                raise PlacementError(f"{name} has {count} entries for {self.num_ranks} ranks; give one per rank")
        for rank, slowdown in enumerate(self.slowdowns):
            if not 0 < slowdown < math.inf:
                raise PlacementError(f"slowdowns[{rank}] is {slowdown}: give 1 for ordinary speed, 2 for half of it")
        if self.ranks_per_node is not None and whole("ranks_per_node", self.ranks_per_node) < 1:
            raise PlacementError(f"ranks_per_node is {self.ranks_per_node}: a node has at least 1")
        if self.node_link is not None and self.ranks_per_node is None:
            raise PlacementError("node_link joins nodes: give the number of ranks of a node as ranks_per_node")

    def _take(self, measured: Cluster) -> None:
        """Take a measured cluster's limits. Raises PlacementError if other arguments contradict it."""
        if self.node_link is not None or self.ranks_per_node is not None:
            raise PlacementError("leave node_link and ranks_per_node out: a cluster has the links of all pairs")
        if measured.num_ranks < self.num_ranks:
            raise PlacementError(
                f"link is a cluster of {measured.num_ranks} ranks for {self.num_ranks}; measure the links of all"
            )
        if any(limit is not None for limit in measured.limit_bytes):
            if self.limit_bytes is not None:
                raise PlacementError("the cluster has limit_bytes too; give them once")
            object.__setattr__(self, "limit_bytes", measured.limit_bytes[: self.num_ranks])

    def __str__(self) -> str:
        """One line."""
        return f"Machine of {count_text(self.num_ranks, 'rank')}, {limit_text(self.limits)}"

    __repr__ = angle_repr

    @property
    def prices_sums(self) -> bool:
        """Whether the cost of sums over processes is known: measured, or by the rates of all links."""
        links = (
            [self.link] if isinstance(self.link, Link) else [self.link.link, *(link for *_, link in self.link.links)]
        )
        links += [] if self.node_link is None else [self.node_link]
        return bool(self.all_reduces) or all(link.bytes_per_us is not None for link in links)

    @property
    def prices_transfers(self) -> bool:
        """Whether transfers cost time."""
        return self.link != _ANY_LINK or self.node_link is not None

    @property
    def limits(self) -> tuple[int | None, ...]:
        """The limit of each process."""
        assert isinstance(self.limit_bytes, tuple)
        return self.limit_bytes

    def between(self, a: int, b: int) -> Link:
        """The link from process `a` to process `b`."""
        if isinstance(self.link, Cluster):
            return self.link.link_between(a, b)
        size = self.ranks_per_node
        if self.node_link is None or size is None or a // size == b // size:
            return self.link
        return self.node_link

    def holders(self, num_ranks: int, num_replicas: int, rank: int) -> range:
        """The processes that are rank `rank` of a pipeline, one per replica."""
        return range(rank, num_ranks * num_replicas, num_ranks)

    def slowdowns_of(self, num_ranks: int, num_replicas: int) -> tuple[float, ...]:
        """The slowdown of each rank of a pipeline: that of its slowest replica, for which the others wait."""
        end = num_ranks * num_replicas
        return tuple(max(self.slowdowns[rank:end:num_ranks]) for rank in range(num_ranks))

    def cluster(self, num_ranks: int, num_replicas: int) -> Cluster:
        """The cluster of one pipeline's ranks, with the lowest limits and the slowest links of all replicas."""
        limits = []
        for rank in range(num_ranks):
            there = [self.limits[process] for process in self.holders(num_ranks, num_replicas, rank)]
            limits.append(min((limit for limit in there if limit is not None), default=None))
        most = self.link.link if isinstance(self.link, Cluster) else self.link
        starts = range(0, num_ranks * num_replicas, num_ranks)
        links = []
        for a in () if self._are_alike else range(num_ranks):
            for b in range(num_ranks):
                link = _slowest({self.between(start + a, start + b) for start in starts}) if a != b else most
                if link != most:
                    links.append((a, b, link))
        gap_us = self.link.gap_us if isinstance(self.link, Cluster) else 0
        return Cluster(tuple(limits), most, tuple(links), self._shared(num_ranks, num_replicas), gap_us)

    def _shared(self, num_ranks: int, num_replicas: int) -> tuple[SharedLink, ...]:
        """What the ranks of a pipeline share: replicas that share it too leave each other their part of its rate."""
        made: dict[tuple[tuple[int, ...], tuple[int, ...]], SharedLink] = {}
        for shared in self.link.shared if isinstance(self.link, Cluster) and num_ranks > 1 else ():
            of_replica = []
            for start in range(0, num_ranks * num_replicas, num_ranks):
                here = range(start, start + num_ranks)
                ends = [tuple(p - start for p in of if p in here) for of in (shared.senders, shared.receivers)]
                of_replica += [(ends[0], ends[1])] if all(ends) else []
            for ends_of in dict.fromkeys(of_replica):
                rate = max(shared.bytes_per_us // len(of_replica), 1)
                known = made.get(ends_of)
                if known is None or rate < known.bytes_per_us:
                    made[ends_of] = SharedLink(shared.name, rate, *ends_of)
        return tuple(made.values())

    @property
    def _are_alike(self) -> bool:
        """Whether one link joins all pairs."""
        return self.node_link is None and not (isinstance(self.link, Cluster) and self.link.links)

    def ring(self, processes: Sequence[int]) -> Link:
        """The slowest link of a ring of these processes: its highest latency and its lowest rate."""
        if self._are_alike:
            return self.between(0, 1)
        pairs = zip(processes, [*processes[1:], processes[0]], strict=True)
        return _slowest({self.between(a, b) for a, b in pairs})

    def reduce_us(self, num_bytes: int, processes: Sequence[int]) -> int:
        """The time of an all-reduce of `num_bytes` by these processes: as measured, else that of a ring.

        In a ring each of the n processes sends n - 1 parts of 1/n to sum, and as many again to share, over the slowest
        link: 2 (n - 1) (latency + bytes / n / rate).
        """
        n = len(processes)
        if n < 2 or not num_bytes:
            return 0
        if n in self.all_reduces:
            return _between(self.all_reduces[n], num_bytes)
        return 2 * (n - 1) * self.ring(processes).transfer_us(-(-num_bytes // n))


def _slowest(links: Collection[Link]) -> Link:
    """A link with the highest times and the lowest rates of these."""

    def lowest(rates: Iterable[int | None]) -> int | None:
        return min((rate for rate in rates if rate is not None), default=None)

    return Link(
        max(link.latency_us for link in links),
        lowest(link.bytes_per_us for link in links),
        max(link.send_us for link in links),
        lowest(link.send_bytes_per_us for link in links),
        max(link.receive_us for link in links),
        lowest(link.receive_bytes_per_us for link in links),
    )


def _between(points: Sequence[tuple[int, int]], num_bytes: int) -> int:
    """The time of a size between measured ones, on a line; below the smallest its time, above the largest its rate."""
    for (small, least_us), (large, most_us) in pairwise(points):
        if small < num_bytes <= large:
            return math.ceil(least_us + (most_us - least_us) * (num_bytes - small) / (large - small))
    return points[0][1] if num_bytes <= points[0][0] else math.ceil(points[-1][1] * num_bytes / points[-1][0])
