"""The machine of a plan: processes, their memory and speed, and the links between them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from rota.core.cluster import AllReduceTimes, Cluster, Link, SharedLink
from rota.core.errors import PlacementError
from rota.core.reading import whole
from rota.core.text import angle_repr, count_text, limit_text

_ANY_LINK = Link()  # infinitely fast
_MOST_RANKS = 100_000  # more than any machine has; the time to look at a layout grows with them


@dataclass(frozen=True, slots=True)
class Machine:
    """The processes that a plan may use, all or some of them, numbered as in `rota.mesh`.

    Rank r of replica k, of pipelines on p ranks, is process k · p + r.

    Attributes:
        num_ranks: The number of processes.
        limit_bytes: Maximum bytes that a process may hold: one number, or one per process (None: no limit).
        link: The link between processes of a node; or a Cluster with the links of all pairs and all-reduces, as
            measured by `rota.profiling.measure_links`, and maybe limits.
        ranks_per_node: Number of neighbouring processes on one node (None: all).
        node_link: The link between processes of different nodes (None: `link`).
        slowdowns: The factor of each process's times (empty: 1).

    Raises:
        PlacementError: A value is invalid, or contradicts another one.
    """

    num_ranks: int
    limit_bytes: tuple[int | None, ...] | int | None = None
    link: Link | Cluster = _ANY_LINK
    ranks_per_node: int | None = None
    node_link: Link | None = None
    slowdowns: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if whole("num_ranks", self.num_ranks) < 1:
            raise PlacementError(f"num_ranks is {self.num_ranks}: a machine has at least 1")
        if self.num_ranks > _MOST_RANKS:
            raise PlacementError(
                f"num_ranks is {self.num_ranks:,}, more than any machine has; give {_MOST_RANKS:,} at most"
            )
        if isinstance(self.link, Cluster):
            self._take(self.link)
        limit = self.limit_bytes
        limits = limit if isinstance(limit, tuple) else (limit,) * self.num_ranks
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
        """Whether the cost of sums over processes is known: measured, or as bytes take time between all of them."""
        if self.all_reduces and self.all_reduces[-1].num_ranks >= self.num_ranks:
            return True
        all_share = any({*range(self.num_ranks)} <= {*s.senders} & {*s.receivers} for s in self._shared_links)
        return all_share or all(link.bytes_per_us is not None for link in self._links)

    @property
    def prices_transfers(self) -> bool:
        """Whether transfers cost time."""
        return bool(self._shared_links) or any(link != _ANY_LINK for link in self._links)

    @property
    def all_reduces(self) -> tuple[AllReduceTimes, ...]:
        """Measured sums over processes. They replace times computed from the links."""
        return self.link.all_reduces if isinstance(self.link, Cluster) else ()

    @property
    def _links(self) -> list[Link]:
        """All links that may be used."""
        if isinstance(self.link, Cluster):
            return [self.link.link, *(link for *_, link in self.link.links)]
        return [self.link, *([] if self.node_link is None else [self.node_link])]

    @property
    def _shared_links(self) -> tuple[SharedLink, ...]:
        return self.link.shared if isinstance(self.link, Cluster) else ()

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
            holder_limits = [self.limits[process] for process in self.holders(num_ranks, num_replicas, rank)]
            limits.append(min((limit for limit in holder_limits if limit is not None), default=None))
        most = self.link.link if isinstance(self.link, Cluster) else self.link
        starts = range(0, num_ranks * num_replicas, num_ranks)
        links = []
        for a in () if self._are_alike else range(num_ranks):
            for b in range(num_ranks):
                link = _slowest({self.between(start + a, start + b) for start in starts}) if a != b else most
                if link != most:
                    links.append((a, b, link))
        all_reduces = tuple(measured for measured in self.all_reduces if measured.num_ranks <= num_ranks)
        return Cluster(tuple(limits), most, tuple(links), self._shared(num_ranks, num_replicas), all_reduces)

    def _shared(self, num_ranks: int, num_replicas: int) -> tuple[SharedLink, ...]:
        """What the ranks of a pipeline share: replicas that share it too leave each other their part of its rate."""
        slowest: dict[tuple[tuple[int, ...], tuple[int, ...]], SharedLink] = {}
        for shared in self._shared_links if num_ranks > 1 else ():
            ends = []
            for start in range(0, num_ranks * num_replicas, num_ranks):
                replica = range(start, start + num_ranks)
                senders, receivers = (
                    tuple(process - start for process in processes if process in replica)
                    for processes in (shared.senders, shared.receivers)
                )
                ends += [(senders, receivers)] if senders and receivers else []
            for pair in dict.fromkeys(ends):
                link = SharedLink(shared.name, max(shared.bytes_per_us // len(ends), 1), *pair)
                slowest[pair] = min(slowest.get(pair, link), link, key=lambda candidate: candidate.bytes_per_us)
        return tuple(slowest.values())

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

        Measured is that of the same number of processes, or of the next larger one. In a ring each of the n processes
        sends n - 1 parts of 1/n to sum, and as many again to share, over the slowest link. Each time all of them send a
        part, wait until what they share has served all parts, and receive one.
        """
        n = len(processes)
        if n < 2 or not num_bytes:
            return 0
        for measured in self.all_reduces:
            if measured.num_ranks >= n:
                return measured.us(num_bytes)
        link, part = self.ring(processes), -(-num_bytes // n)
        served_us = max(self._served_us(processes, part), default=0)
        on_wire_us = max(link.transfer_us(part), link.latency_us + served_us)
        return 2 * (n - 1) * on_wire_us

    def _served_us(self, processes: Sequence[int], part: int) -> Iterator[int]:
        """For each shared link the time in which it serves a message to each process's next one in the ring."""
        for shared in self._shared_links:
            senders, receivers = {*shared.senders}, {*shared.receivers}
            pairs = zip(processes, [*processes[1:], processes[0]], strict=True)
            served = sum(a in senders and b in receivers for a, b in pairs)
            yield -(-served * part // shared.bytes_per_us)


def _slowest(links: Collection[Link]) -> Link:
    """A link with the highest latency and the lowest rate of these."""
    rates = [link.bytes_per_us for link in links if link.bytes_per_us is not None]
    return Link(max(link.latency_us for link in links), min(rates, default=None))
