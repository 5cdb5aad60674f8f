"""Pipelines whose messages are measured: a chain with one message at a time, and levels of ranks that all send at once.

    pair      rank a   ██ op ██│────▶               ██ op ██│────▶             a micro-batch goes there and back; each
              rank b                ██ op ██│────▶               ██ op ██│     message has the wire to itself

    levels    rank 0   ██│──▶██│──▶██               every rank of a host sends to its neighbours, level after level
              rank 1   ██│◀─▶██│◀─▶██
              rank 2   ██│──▶██│──▶██

An op computes for about a millisecond, so that messages come at a pipeline's pace. The runtime is that of every other
run. A message takes from the end of the op that makes it to the start of the op that waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple, final

import torch
from torch import nn

from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.placing import place
from rota.core.plan import Plan
from rota.core.tasks import Kind, Op
from rota.core.timeline import Timeline
from rota.models import Stages
from rota.runtime.device.protocol import Device, is_queued
from rota.runtime.pipeline import Pipeline

Pair = tuple[int, int]  # two ranks, the lower one first

SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)  # up to 16 MiB
LEVEL_SIZES = (1 << 20, 1 << 22)
_NUM_LEVELS = 6
_PACE_NS = 1_000_000  # of an op: as long as a short one
_WIDTH = 64  # of its matrices: they stay in a core's cache
_WARM_UP = 2  # steps: connections are made, and their windows grow


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


def messages_alone(
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


def messages_at_once(ranks: Sequence[int], num_ranks: int, device: Device, repeats: int) -> list[float]:
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
