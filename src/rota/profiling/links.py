"""Latency and rate of the links between processes, measured by round trips of messages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from rota.costs import Cluster, Link
from rota.errors import PipelineError
from rota.runtime.json_messages import all_gather_json, broadcast_json

_BIG_BYTES = 4_000_000


def measure_link(sender: int, receiver: int, repeats: int = 7) -> Link:
    """Measure the link between two processes of the default group while nothing else uses it. Collective.

    Args:
        sender: One process.
        receiver: The other.
        repeats: Number of round trips; the fastest counts, as other load only makes them slower.

    Returns:
        The same link on all processes: half of a one-byte message's round trip as latency, and the rate of 4 MB.

    Raises:
        PipelineError: These are not two processes of the group.
    """
    size, mine = dist.get_world_size(), dist.get_rank()
    if sender == receiver or not {sender, receiver} <= {*range(size)}:
        raise PipelineError(f"no link from process {sender} to {receiver}; give two different ones of 0 to {size - 1}")
    found = None
    if mine in (sender, receiver):
        found = _measured(receiver if mine == sender else sender, mine == sender, repeats)
    with _cpu_group() as group:
        return Link(*broadcast_json(_fields(found) if found else None, sender, group))


def measure_links(repeats: int = 7) -> Cluster:
    """Measure the links between all pairs of processes of the default group. Collective.

    In each round every process has one peer: the pairs of a round use the wires at once, as in a run. The two
    directions of a pair count as equal.

    Args:
        repeats: Number of round trips per pair; the fastest counts.

    Returns:
        The same cluster on all processes, without memory limits; its `link` is the median one.
    """
    size, mine = dist.get_world_size(), dist.get_rank()
    found: dict[int, Link] = {}
    for pairs in rounds(size):
        dist.barrier()
        for a, b in pairs:
            if mine in (a, b):
                found[a + b - mine] = _measured(a + b - mine, mine == a, repeats)
    with _cpu_group() as group:
        gathered = all_gather_json({str(peer): _fields(link) for peer, link in found.items()}, group)
    links = {(a, b): Link(*gathered[a][str(b)]) for pairs in rounds(size) for a, b in pairs}
    return cluster_of(size, links)


def _fields(link: Link) -> tuple[int, int | None]:
    return link.latency_us, link.bytes_per_us


@contextmanager
def _cpu_group() -> Iterator[dist.ProcessGroup | None]:
    """A group for values on the CPU: the default one, unless that is NCCL's."""
    group = dist.new_group(backend="gloo") if dist.get_backend() == "nccl" else None
    try:
        yield group
    finally:
        if group is not None:
            dist.destroy_process_group(group)


def rounds(size: int) -> Iterator[list[tuple[int, int]]]:
    """Every pair of `size` processes once, no process twice in a round (a round-robin tournament)."""
    circle = [*range(size + size % 2)]  # with an empty place if their number is odd
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < size]
        circle[1:] = [circle[-1], *circle[1:-1]]


def cluster_of(size: int, links: dict[tuple[int, int], Link]) -> Cluster:
    """The median link for all pairs, and those that differ from it one by one, in both directions."""
    ordered = sorted(links.values(), key=lambda link: link.transfer_us(_BIG_BYTES))
    middle = ordered[len(ordered) // 2] if ordered else Link()
    others = ((*pair, link) for (a, b), link in sorted(links.items()) if link != middle for pair in ((a, b), (b, a)))
    return Cluster((None,) * size, middle, tuple(others))


def _measured(peer: int, starts: bool, repeats: int) -> Link:
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    small, big = (one_way_us(peer, starts, num_bytes, repeats, device) for num_bytes in (1, _BIG_BYTES))
    return link_of(small, big)


def link_of(small_us: float, big_us: float, big_bytes: int = _BIG_BYTES) -> Link:
    """The link that transfers one byte in `small_us` and `big_bytes` in `big_us`."""
    return Link(round(small_us), max(round(big_bytes / max(big_us - small_us, 1)), 1))


def one_way_us(
    peer: int,
    starts: bool,
    num_bytes: int,
    repeats: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> float:
    """Half of the fastest round trip of a message on `device`, in µs. Both processes call it, one of them `starts`."""
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    times = []
    for _ in range(1 + repeats):  # the first one makes the connection
        start = time.perf_counter_ns()
        if starts:
            dist.send(message, peer, group)
        dist.recv(message, peer, group)
        if not starts:
            dist.send(message, peer, group)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter_ns() - start)
    return min(times[1:]) / 2000
