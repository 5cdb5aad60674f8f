"""Links between processes, as a pipeline meets them: latency and rate of each pair, and what a host's ranks share.

What is measured are messages of pipelines: a chain with one at a time, and levels of ranks that all send at once.

    pair      rank a   ██ op ██│────▶               ██ op ██│────▶             a micro-batch goes there and back; each
              rank b                ██ op ██│────▶               ██ op ██│     message has the wire to itself

    levels    rank 0   ██│──▶██│──▶██               every rank of a host sends to its neighbours, level after level
              rank 1   ██│◀─▶██│◀─▶██
              rank 2   ██│──▶██│──▶██

An op computes for about a millisecond, so that messages come at a pipeline's pace. The runtime is that of every other
run. A message takes from the end of the op that makes it to the start of the op that waits for it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import nn

from rota.core.cluster import AllReduceTimes, Cluster, Link, SharedLink
from rota.core.costs import Costs
from rota.core.errors import PipelineError
from rota.core.placing import place
from rota.core.plan import Plan
from rota.core.tasks import Kind, Op
from rota.core.text import size_text, time_text
from rota.core.timeline import Timeline
from rota.models import Stages
from rota.runtime.device.choosing import device_at
from rota.runtime.device.local import CPU, backends_of, current_device, local_device
from rota.runtime.device.protocol import Device, is_queued
from rota.runtime.json_messages import all_gather_json
from rota.runtime.pipeline import Pipeline
from rota.runtime.process_group import join

REPEATS = 15
SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)  # up to 16 MiB
LEVEL_SIZES = (1 << 20, 1 << 22)
SUM_SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)  # bytes of gradients, up to 16 MiB
_NUM_LEVELS = 6
_PACE_NS = 1_000_000  # of an op: as long as a short one
_WIDTH = 64  # of its matrices: they stay in a core's cache
_WARM_UP = 2  # steps: connections are made, and their windows grow
_SHORT = 3  # times as many of all but the largest: in some of these a thread waits for a core, which counts for much
_MOST_PAIRS = 6  # of two hosts: those between neighbours first
_ALIKE = 2.0  # by how much pairs of the same two hosts may differ and have one link
_COMPARED_BYTES = 1 << 20
_FASTEST_BYTES_PER_US = 4_000_000  # 4 TB/s: a wire this fast counts as one without limit
_STEADY, _STEADY_US = 1.0, 200.0  # the median may be above the fastest quarter by so much of it, and so many µs

Pair = tuple[int, int]  # two ranks, the lower one first
Report = Callable[[str], None]


class MeasuredLinks(NamedTuple):
    """A cluster without memory limits, and what was measured, in words.

    `doubt`: why it may be wrong, and what to do; "" if nothing speaks against it. `text` says it, too.
    """

    cluster: Cluster
    text: str
    doubt: str = ""


def measure_links(
    repeats: int = REPEATS, *, device: torch.device | None = None, report: Report = lambda _: None
) -> MeasuredLinks:
    """Measure the links between the processes of the default group. Collective.

    Messages are those of pipelines on these processes: one at a time between pairs of ranks, and between all neighbours
    of a host at once. Between CPUs, all-reduces are measured as well. See `docs/profiling.md`.

    Args:
        repeats: Number of messages of each size, of which the median counts.
        device: Where this process's messages are, such as `rota.local_device()`. None: the CPU, or the current
            accelerator if the default group takes no tensors of the CPU.
        report: Called on the first process with a line of text for what is being measured.

    Returns:
        The same on all processes: a cluster without memory limits, whose `link` is the most frequent one.

    Raises:
        PipelineError: There is only one process, or the processes are on devices of different types.
    """
    own, size = _own_device(device), dist.get_world_size()
    if size < 2:
        raise PipelineError("this is the only process, and a link needs two; start more of them")
    report = report if dist.get_rank() == 0 else lambda _: None
    names = all_gather_json(_host_name())
    hosts = [names.index(name) for name in names]
    report(f"messages between {size} ranks, one at a time")
    alone = _messages_alone(_pairs_of(hosts), size, own, repeats)
    report("messages between all neighbours at once")
    rounds = {
        host: _messages_at_once(ranks, size, own, max(repeats // 2, 1))
        for host in sorted({*hosts})
        if len(ranks := [rank for rank, host_of_rank in enumerate(hosts) if host_of_rank == host]) > 1
    }
    all_reduces: tuple[AllReduceTimes, ...] = ()
    if not is_queued(own):
        report("sums over ranks")
        all_reduces = measure_all_reduces(repeats)
    shortened = {host: names[host].split()[0] for host in rounds}
    every = all_gather_json([[[a, b, times] for (a, b), times in alone.items()], [*rounds.items()]])[0]
    alone, rounds = {(a, b): times for a, b, times in every[0]}, dict(every[1])
    links = links_of(alone, hosts)
    named = {f"host {shortened[host]}": (host, times) for host, times in rounds.items()}
    cluster = replace(cluster_of(links, hosts, named), all_reduces=all_reduces)
    doubt = unsteady(alone)
    return MeasuredLinks(cluster, "\n".join([*_lines(alone), *_shared_lines(cluster), *filter(None, [doubt])]), doubt)


def links_of_launched(repeats: int = REPEATS, report: Report = lambda _: None) -> MeasuredLinks | None:
    """The links of the launcher's processes, on the first of them; None on the others. See `measure_links`.

    Messages are between the processes' `local_device`s.
    """
    owns = join()
    try:
        links = measure_links(repeats, device=local_device(), report=report)
        return links if dist.get_rank() == 0 else None
    finally:
        if owns:
            dist.destroy_process_group()


# --- sums over ranks --------------------------------------------------------------------------------------------------


def measure_all_reduces(repeats: int) -> tuple[AllReduceTimes, ...]:
    """Measure all-reduces by groups of the default group's processes. Collective.

    As many groups as there are processes for reduce at once, as the ranks of replicated pipelines do.

    Args:
        repeats: Number of all-reduces of the largest size; there are three times as many of the others.

    Returns:
        The median times of each size, by the number of processes in a group; of all groups the slowest process counts.
        Noise may make a larger sum the faster one, but these times never fall.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    measured = []
    for together in numbers_of(size):
        apart = size // together  # processes from one of a group to its next one, as in pipelines of so many ranks
        groups = [dist.new_group([*range(first, apart * together, apart)]) for first in range(apart)]
        group = groups[rank % apart] if rank < apart * together else None
        own = [_sum_times_us(group, n, repeats if n == SUM_SIZES[-1] else _SHORT * repeats) for n in SUM_SIZES]
        of_sizes = zip(*all_gather_json(own), strict=True)  # for each size, the times of every rank
        slowest = (map(max, zip(*of_ranks, strict=True)) for of_ranks in of_sizes)
        medians_us = accumulate((round(median(times)) for times in slowest), max)
        measured.append(AllReduceTimes(together, tuple(zip(SUM_SIZES, medians_us, strict=True))))
        if group is not None:
            dist.destroy_process_group(group)
    return tuple(measured)


def numbers_of(size: int) -> Iterator[int]:
    """The numbers of processes that are measured: all of them, and each power of 2 below."""
    number = 2
    while number < size:
        yield number
        number *= 2
    yield size


def _sum_times_us(group: dist.ProcessGroup | None, num_bytes: int, repeats: int) -> list[float]:
    """Times of this process's group, after one to make the connections; 0 on a process that is in none, which waits."""
    values = torch.zeros(num_bytes // 4)
    times = []
    for _ in range(1 + repeats):
        dist.barrier()
        began_ns = time.perf_counter_ns()
        if group is not None:
            dist.all_reduce(values, group=group)
        times.append((time.perf_counter_ns() - began_ns) / 1000 if group is not None else 0.0)
    return times[1:]


# --- from times to links ----------------------------------------------------------------------------------------------


def line_through(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """µs for each message and for each of its bytes that are nearest to the times, in relative errors; none negative.

    Points on such a line are met exactly.
    """
    weighted = [(num_bytes, us, 1 / max(us, 1e-9) ** 2) for num_bytes, us in points]
    weight = sum(w for *_, w in weighted)
    mean_bytes, mean_us = sum(w * n for n, _, w in weighted) / weight, sum(w * us for _, us, w in weighted) / weight
    by_bytes = sum(w * (n - mean_bytes) ** 2 for n, _, w in weighted)
    per_byte = sum(w * (n - mean_bytes) * (us - mean_us) for n, us, w in weighted) / by_bytes if by_bytes else 0.0
    if per_byte <= 0:
        return max(mean_us, 0.0), 0.0
    if (latency_us := mean_us - per_byte * mean_bytes) >= 0:
        return latency_us, per_byte
    return 0.0, sum(w * n * us for n, us, w in weighted) / sum(w * n * n for n, _, w in weighted)


def link_of(times: Iterable[Sequence[Sequence[float]]]) -> Link:
    """The link of one or more pairs, from the times of messages of each of `SIZES`."""
    points = [(size, median(of_size)) for of_pair in times for size, of_size in zip(SIZES, of_pair, strict=False)]
    latency_us, per_byte = line_through(points)
    is_limited = per_byte * _FASTEST_BYTES_PER_US > 1
    return Link(round(latency_us), max(round(1 / per_byte), 1) if is_limited else None)


def links_of(alone: Mapping[Pair, Sequence[Sequence[float]]], hosts: Sequence[int]) -> dict[Pair, Link]:
    """The link of every pair: one for all pairs of the same two hosts, unless some take twice as long as others."""
    links: dict[Pair, Link] = {}
    every = [(a, b) for b in range(len(hosts)) for a in range(b)]
    for ends in {frozenset((hosts[a], hosts[b])) for a, b in every}:
        pairs = [pair for pair in every if frozenset(hosts[rank] for rank in pair) == ends]
        measured = [pair for pair in pairs if pair in alone]
        links |= dict.fromkeys(pairs, link_of(alone[pair] for pair in measured))
        own = {pair: link_of([alone[pair]]) for pair in measured}
        times = [link.transfer_us(_COMPARED_BYTES) for link in own.values()]
        if max(times) > _ALIKE * min(times):
            links |= own
    return links


def cluster_of(
    links: Mapping[Pair, Link], hosts: Sequence[int], rounds: Mapping[str, tuple[int, Sequence[float]]]
) -> Cluster:
    """The most frequent link, those that differ from it one by one, and the rate that the ranks of a host share.

    Args:
        links: Of each pair, the lower rank first.
        hosts: Of each rank, a number.
        rounds: For each host with several ranks its number, and a round's time for each of `LEVEL_SIZES`.
    """
    middle = max(links.values(), key=[*links.values()].count)
    others = ((*ends, link) for pair, link in sorted(links.items()) for ends in (pair, pair[::-1]) if link != middle)
    shared = []
    for name, (host, times) in rounds.items():
        ranks = tuple(rank for rank, host_of_rank in enumerate(hosts) if host_of_rank == host)
        latency_us, num_messages = links[ranks[0], ranks[1]].latency_us, 2 * (len(ranks) - 1)
        rates = [num_messages * n / max(us - latency_us, 1.0) for n, us in zip(LEVEL_SIZES, times, strict=True)]
        shared.append(SharedLink(name, max(round(median(rates)), 1), ranks, ranks))
    return Cluster((None,) * len(hosts), middle, tuple(others), tuple(shared))


def unsteady(alone: Mapping[Pair, Sequence[Sequence[float]]]) -> str:
    """Why these times may be wrong, and what to do; "" if they vary little."""
    for (a, b), of_pair in alone.items():
        for size, times in zip(SIZES, of_pair, strict=True):
            middle, low = median(times), quantiles(times, n=4, method="inclusive")[0] if len(times) > 1 else times[0]
            if middle > low + max(_STEADY * low, _STEADY_US):
                return (
                    f"{size_text(size)} between ranks {a} and {b} took {time_text(round(middle))}, but "
                    f"{time_text(round(low))} or less in a quarter of the repeats: close other programs, and "
                    "measure again"
                )
    return ""


def _lines(alone: Mapping[Pair, Sequence[Sequence[float]]]) -> Iterable[str]:
    for (a, b), of_pair in alone.items():
        times = (
            f"{size_text(n)} {time_text(round(median(of_size)))}" for n, of_size in zip(SIZES, of_pair, strict=True)
        )
        yield f"{a} ↔ {b}: {', '.join(times)}"


def _shared_lines(cluster: Cluster) -> Iterable[str]:
    for shared in cluster.shared:
        yield f"{shared.name}: {size_text(shared.bytes_per_us * 1_000_000)}/s between all neighbours at once"
    yield from map(str, cluster.all_reduces)


# --- processes --------------------------------------------------------------------------------------------------------


def _own_device(device: torch.device | None) -> Device:
    """This process's device. Collective. Raises PipelineError if the processes have devices of different types."""
    backends = backends_of()
    kind = next((kind for kind, backend in backends.items() if backend != backends.get(CPU)), CPU)
    own = device_at(device or current_device(kind))
    types = all_gather_json(own.torch_device.type)
    if len({*types}) > 1:
        places = ", ".join(f"process {i} on {kind}" for i, kind in enumerate(types))
        raise PipelineError(
            f"links are measured between devices of one type, but there are {places}; start fewer processes per "
            f"machine, or measure on the CPU (--device cpu)"
        )
    return own


def _host_name() -> str:
    """Tells hosts apart, also those of one name: the name, and the identity of the running kernel."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}".strip()


def _pairs_of(hosts: Sequence[int]) -> list[Pair]:
    """The pairs of ranks, the lower one first, that are measured: some of each two hosts, neighbours first."""
    num_of: dict[frozenset[int], int] = {}
    pairs = []
    every = ((a, a + apart) for apart in range(1, len(hosts)) for a in range(len(hosts) - apart))
    for a, b in every:
        ends = frozenset((hosts[a], hosts[b]))
        num_of[ends] = num_of.get(ends, 0) + 1
        if num_of[ends] <= _MOST_PAIRS:
            pairs.append((a, b))
    return pairs


# --- pipelines whose messages are measured ----------------------------------------------------------------------------


@final
class _Work:
    """Small matrix products, which keep this process's device busy for about `_PACE_NS`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._matrix = torch.full((_WIDTH, _WIDTH), 1e-3, device=device.torch_device)
        self._count = 16
        self._count = max(16 * _PACE_NS // max(min(self._timed_ns() for _ in range(8)), 1), 1)

    def __call__(self) -> None:
        for _ in range(self._count):
            torch.mm(self._matrix, self._matrix)

    def _timed_ns(self) -> int:
        began_ns = time.perf_counter_ns()
        self()
        if is_queued(self._device):
            self._device.synchronize()
        return time.perf_counter_ns() - began_ns


class _Message(torch.autograd.Function):
    """Computes, and makes a tensor of so many numbers; its backward computes, and makes gradients like the inputs."""

    @staticmethod
    def forward(ctx: Any, work: _Work, num_numbers: int, *values: torch.Tensor) -> torch.Tensor:
        ctx.work, ctx.shapes = work, [value.shape for value in values]
        work()
        return values[0].new_full((1, num_numbers), 1e-3)  # memory that is written to, as an op's output is

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.work()
        return (None, None, *map(gradient.new_zeros, ctx.shapes))


@final
class _Sender(nn.Module):
    """A stage that computes and sends a tensor of so many bytes."""

    def __init__(self, work: _Work, device: Device, num_bytes: int) -> None:
        super().__init__()
        self._work, self._num_numbers = work, max(num_bytes // 4, 1)
        self._weight = nn.Parameter(torch.zeros(1, device=device.torch_device))

    def forward(self, *values: torch.Tensor) -> Any:
        """A tensor that depends on the stage's weight and all that it gets."""
        return _Message.apply(self._work, self._num_numbers, self._weight, *values)


class _Graph(NamedTuple):
    """Stages in the order of their forwards: the rank of each, the bytes that it sends, and its edges."""

    ranks: list[int]
    sizes: list[int]
    edges: list[tuple[int, int]]

    def add(self, rank: int, num_bytes: int, *sources: int) -> int:
        """Add a stage that reads what `sources` send; returns its number."""
        self.ranks.append(rank)
        self.sizes.append(num_bytes)
        self.edges.extend((source, len(self.ranks) - 1) for source in sources)
        return len(self.ranks) - 1

    def plan(self, num_ranks: int) -> Plan:
        """One micro-batch, forward and backward."""
        costs, cluster = Costs.uniform(len(self.ranks)), Cluster.uniform(num_ranks)
        numbers = range(len(self.ranks))
        ops = [Op(stage, Kind.F, 0) for stage in numbers] + [Op(stage, Kind.B, 0) for stage in reversed(numbers)]
        orders = (tuple(op for op in ops if self.ranks[op.stage] == rank) for rank in range(num_ranks))
        return Plan(place(costs, cluster, self.ranks, self.edges), 1, tuple(orders))


def _timelines(graph: _Graph, num_ranks: int, device: Device, repeats: int) -> Iterator[Timeline]:
    """Run the stages on all processes of the default group, `repeats` times. Collective."""
    work = _Work(device)
    stages = Stages([_Sender(work, device, size) for size in graph.sizes], graph.edges)
    inputs = torch.zeros(1, 1, device=device.torch_device)
    with Pipeline(stages, graph.plan(num_ranks), lambda output, _: output.sum(), check_data="never") as pipeline:
        for number in range(_WARM_UP + repeats):
            pipeline.step(inputs, inputs)
            if number >= _WARM_UP:
                yield pipeline.timeline()


def _times_of(timeline: Timeline) -> dict[Op, tuple[int, int]]:
    return {span.work: (span.start_us, span.end_us) for span in timeline.op_spans() if isinstance(span.work, Op)}


def _messages_alone(
    pairs: Sequence[Pair], num_ranks: int, device: Device, repeats: int
) -> dict[Pair, list[list[float]]]:
    """Times of single messages between pairs of ranks, in µs, both directions in the mean. Collective.

    Returns:
        For each pair and each of `SIZES`, `repeats` times.
    """
    graph = _Graph([], [], [])
    last = graph.add(pairs[0][0], 4)
    first: dict[Pair, int] = {}  # of each pair, the stage that sends its first message
    for pair in pairs:
        last = first[pair] = graph.add(pair[0], SIZES[0], last)
        for i in range(len(SIZES)):
            last = graph.add(pair[1 - i % 2], SIZES[i + 1] if i + 1 < len(SIZES) else 4, last)
    for rank in {*range(num_ranks)} - {*graph.ranks}:  # no rank is left out of a pipeline
        last = graph.add(rank, 4, last)
    messages_us: dict[Pair, list[list[float]]] = {pair: [[] for _ in SIZES] for pair in pairs}
    for timeline in _timelines(graph, num_ranks, device, repeats):
        times = _times_of(timeline)
        for pair, stage in first.items():
            for i in range(len(SIZES)):
                a, b = stage + i, stage + i + 1
                there_us = times[Op(b, Kind.F, 0)][0] - times[Op(a, Kind.F, 0)][1]
                back_us = times[Op(a, Kind.B, 0)][0] - times[Op(b, Kind.B, 0)][1]
                messages_us[pair][i].append((there_us + back_us) / 2)
    return messages_us


def _messages_at_once(ranks: Sequence[int], num_ranks: int, device: Device, repeats: int) -> list[float]:
    """Times of rounds in which all of `ranks` exchange messages with the ranks beside them, in µs. Collective.

    Returns:
        For each of `LEVEL_SIZES` the median round: from when the last rank begins to send until the last one has all.
    """
    graph, levels = _Graph([], [], []), []
    source = graph.add(ranks[0], 4)
    for size in LEVEL_SIZES:
        before = [graph.add(rank, size, source) for rank in ranks]
        of_size = [before]
        for level in range(_NUM_LEVELS):
            sent = size if level + 1 < _NUM_LEVELS else 4
            beside = [before[max(i - 1, 0) : i] + before[i + 1 : i + 2] for i in range(len(ranks))]
            before = [graph.add(rank, sent, *sources) for rank, sources in zip(ranks, beside, strict=True)]
            of_size.append(before)
        levels.append(of_size)
        source = graph.add(ranks[0], 4, *before)
    for rank in {*range(num_ranks)} - {*ranks}:
        source = graph.add(rank, 4, source)
    rounds_us: list[list[float]] = [[] for _ in LEVEL_SIZES]
    for timeline in _timelines(graph, num_ranks, device, repeats):
        times = _times_of(timeline)
        for of_size, of_size_us in zip(levels, rounds_us, strict=True):
            for before, after in pairwise(of_size):
                of_size_us.append(_round_us(times, Kind.F, before, after))
                of_size_us.append(_round_us(times, Kind.B, after, before))
    return [*map(median, rounds_us)]


def _round_us(times: dict[Op, tuple[int, int]], kind: Kind, before: list[int], after: list[int]) -> float:
    begun_us = max(times[Op(stage, kind, 0)][1] for stage in before)
    return max(times[Op(stage, kind, 0)][0] for stage in after) - begun_us
