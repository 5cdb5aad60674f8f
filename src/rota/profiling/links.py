"""Latency and rate of the links between processes: between CPUs by round trips, else see `device_links.py`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from rota.cluster import Cluster, Link
from rota.errors import PipelineError
from rota.profiling.device_beside import measure_beside
from rota.profiling.device_links import LinkSample, Pair, fitted, line_of, measure_pairs, samples_text
from rota.profiling.host_links import MOST_SPREAD, REPEATS, measure_hosts
from rota.profiling.link_fits import Line, link_of_lines
from rota.profiling.spinning import Spinner
from rota.runtime.device.choosing import device_at
from rota.runtime.device.local import current_device
from rota.runtime.device.protocol import Device, QueuedDevice, is_queued
from rota.runtime.json_messages import all_gather_json, broadcast_json

_BIG_BYTES = 4_000_000
_ALIKE = 1.1  # by how much the two directions of a pair may differ and count as one


def measure_link(sender: int, receiver: int, repeats: int = 7, *, device: torch.device | None = None) -> Link:
    """Measure the link between two processes of the default group while nothing else uses it. Collective.

    Args:
        sender: One process.
        receiver: The other.
        repeats: Number of round trips; the fastest counts, as other load only makes them slower.
        device: Where this process's messages are, see `measure_links`.

    Returns:
        The same link on all processes: half of a one-byte message's round trip as latency, and the rate of 4 MB. On
        accelerators as in `measure_links`.

    Raises:
        PipelineError: These are not two processes of the group, or as `measure_links`.
    """
    size, mine = dist.get_world_size(), dist.get_rank()
    if sender == receiver or not {sender, receiver} <= {*range(size)}:
        raise PipelineError(f"no link from process {sender} to {receiver}; give two different ones of 0 to {size - 1}")
    own = _own_device(device)
    if is_queued(own):
        return fitted(measure_pairs(own, [[(sender, receiver)]], repeats)[sender, receiver])
    found = None
    if mine in (sender, receiver):
        found = _measured(receiver if mine == sender else sender, mine == sender, repeats)
    return Link(*broadcast_json(_fields(found) if found else None, sender))


def measure_links(
    repeats: int = REPEATS, *, device: torch.device | None = None, report: Callable[[str], None] = lambda _: None
) -> Cluster:
    """Measure the links between the processes of the default group, and what messages cost them. Collective.

    Between CPUs, by the path that a pipeline's messages take: single messages of many sizes from a sender that has
    computed before, all neighbours of a host at once, how much longer ops take beside messages, sums over ranks, and
    the time between ops. See `docs/profiling.md`. Between accelerators messages of many sizes are measured by events,
    in a process group for each pair, and the link is the nearest to all of them.

    Args:
        repeats: Number of messages of each size; on CPUs the median counts, on accelerators the fastest.
        device: Where this process's messages are, such as `rota.local_device()`. None: the CPU, or the current
            accelerator if the default group takes no tensors of the CPU.
        report: Called with lines of text on the first process: what is being measured, and at the end what was found.

    Returns:
        The same cluster on all processes, without memory limits; its `link` is the most frequent one.

    Raises:
        PipelineError: The processes are on devices of different types, or what is measured cannot be true, or varies
            too much, even when it is measured again.
    """
    found = find_links(repeats, device=device, report=report)
    for line in found.text.splitlines() if dist.get_rank() == 0 else ():
        report(line)
    return found.cluster


class FoundLinks(NamedTuple):
    """A cluster for plans that are run and one for those that are rehearsed, and what was measured, in words.

    `doubt`: why it may be wrong, and what to do; "" if nothing speaks against it. `text` says it, too.
    """

    cluster: Cluster
    rehearsal: Cluster
    text: str
    doubt: str = ""


def find_links(
    repeats: int = REPEATS,
    *,
    device: torch.device | None = None,
    most_spread: float = MOST_SPREAD,
    report: Callable[[str], None] = lambda _: None,
    within_s: float = math.inf,
) -> FoundLinks:
    """As `measure_links`, with all that was found. Collective.

    `most_spread`: see `LinkMeasurements.implausible`. `within_s`: see `measure_hosts`.
    """
    own = _own_device(device)
    report = report if dist.get_rank() == 0 else lambda _: None
    if is_queued(own):
        found = _between_devices(own, repeats, report)
    else:
        measured = measure_hosts(repeats, most_spread, report, within_s)
        found = FoundLinks(measured.cluster(), measured.cluster(rehearsal=True), measured.to_text(), measured.doubt)
    return found


def _between_devices(own: QueuedDevice, repeats: int, report: Callable[[str], None]) -> FoundLinks:
    size, spinner = dist.get_world_size(), Spinner(own)
    report(f"messages between {size} devices, one pair at a time")
    samples = measure_pairs(own, [*rounds(size)], repeats, spinner)
    report("messages between all neighbours at once, and beside kernels")
    beside = measure_beside(own, spinner, repeats)
    links = {
        pair: link_of_lines(line, beside.send, beside.receive)
        for of in rounds(size)
        for ab in of
        for pair, line in _both(ab, samples)
    }
    text = "\n".join(f"{a} → {b}: {samples_text(of_pair)}" for (a, b), of_pair in sorted(samples.items()))
    cluster = replace(cluster_of(size, links), shared=beside.shared)
    return FoundLinks(cluster, cluster, "\n".join([text, *beside.notes]))


def _own_device(device: torch.device | None) -> Device:
    """This process's device. Collective. Raises PipelineError if the processes have devices of different types."""
    if device is None and dist.get_backend() != "gloo":
        device = current_device(torch.accelerator.current_accelerator().type)  # type: ignore[union-attr]
    own = device_at(device or torch.device("cpu"))
    types = all_gather_json(own.torch_device.type)
    if len({*types}) > 1:
        told = ", ".join(f"process {i} on {kind}" for i, kind in enumerate(types))
        raise PipelineError(
            f"links are measured between devices of one type, but there are {told}; start fewer processes per machine, "
            f"or measure on the CPU (--device cpu)"
        )
    return own


def _both(pair: Pair, samples: Mapping[Pair, Sequence[LinkSample]]) -> list[tuple[Pair, Line]]:
    """Times in each direction: the same if they differ by no more than measurements do."""
    there, back = samples[pair], samples[pair[::-1]]
    times = [line_of(of).at(_BIG_BYTES) for of in (there, back)]
    if max(times) <= _ALIKE * min(times):
        return [(of, line_of([*there, *back])) for of in (pair, pair[::-1])]
    return [(pair, line_of(there)), (pair[::-1], line_of(back))]


def _fields(link: Link) -> tuple[int, int | None]:
    return link.latency_us, link.bytes_per_us


def rounds(size: int) -> Iterator[list[tuple[int, int]]]:
    """Every pair of `size` processes once, no process twice in a round (a round-robin tournament)."""
    circle = [*range(size + size % 2)]  # with an empty place if their number is odd
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < size]
        circle[1:] = [circle[-1], *circle[1:-1]]


def cluster_of(size: int, links: dict[tuple[int, int], Link]) -> Cluster:
    """The median link for all pairs, and those that differ from it one by one.

    A link is that of both directions, unless the other one is there too.
    """
    ordered = sorted(links.values(), key=lambda link: link.transfer_us(_BIG_BYTES))
    middle = ordered[len(ordered) // 2] if ordered else Link()
    directed = links | {(b, a): link for (a, b), link in links.items() if (b, a) not in links}
    others = ((*pair, link) for pair, link in sorted(directed.items()) if link != middle)
    return Cluster((None,) * size, middle, tuple(others))


def _measured(peer: int, starts: bool, repeats: int) -> Link:
    cpu = torch.device("cpu")
    small, big = (one_way_us(peer, starts, num_bytes, repeats, cpu) for num_bytes in (1, _BIG_BYTES))
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
