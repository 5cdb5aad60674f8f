"""One step of micro-batches that differ, as arrays: what every task of every micro-batch takes, and on which rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Orders = NDArray[np.int32]  #: [num_ranks, most ops of a rank]: see `Dispatch`

NO_LIMIT = 1 << 60  #: stands for "no memory limit"


class Tables(NamedTuple):
    """A `BatchProblem` for compiled loops. CSR: entries of i are `first[i]` to `first[i + 1] - 1`."""

    durations_us: Integers  #: int64[num_microbatches, num_tasks]
    held_bytes: Integers  #: int64[num_microbatches, num_tasks]
    peak_bytes: Integers  #: int64[num_microbatches, num_tasks]
    lags_us: Integers  #: int64[num_microbatches, num_edges]
    rank_of: Integers  #: int64[num_tasks]
    choice_of: Integers  #: int64[num_tasks]: 0 backwards that others wait for, 1 forwards, 2 the rest
    first_in: Integers
    in_edge: Integers
    in_task: Integers
    first_out: Integers
    out_task: Integers
    first_on: Integers
    on: Integers  #: per rank its tasks, the last of a micro-batch first
    tails_us: Integers  #: int64[num_ranks]: what follows the rank's last op
    loads_us: Integers  #: int64[num_ranks]: the time of all its ops, and what follows the last one


@dataclass(frozen=True)
class BatchProblem:
    """The figures of a step, micro-batch by micro-batch. Each task is on one rank, and tasks are in topological order.

    Attributes:
        durations_us: int64[num_microbatches, num_tasks].
        held_bytes: int64[num_microbatches, num_tasks].
        peak_bytes: int64[num_microbatches, num_tasks].
        lags_us: int64[num_microbatches, num_edges]: the transfer's time; 0 on one rank.
        edge_bytes: int64[num_microbatches, num_edges]: what the transfer carries; 0 on one rank.
        edges: int64[num_edges, 2]: source and target tasks.
        rank_of: int64[num_tasks].
        choice_of: int64[num_tasks]: 0 for backwards that other stages wait for (B, I), 1 for forwards, 2 for the rest.
        limits_bytes: int64[num_ranks], without static bytes; `NO_LIMIT` for none.
        tails_us: int64[num_ranks]: time of the step ends after a rank's last op.
    """

    durations_us: Integers
    held_bytes: Integers
    peak_bytes: Integers
    lags_us: Integers
    edge_bytes: Integers
    edges: Integers
    rank_of: Integers
    choice_of: Integers
    limits_bytes: Integers
    tails_us: Integers

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches."""
        return len(self.durations_us)

    @property
    def num_tasks(self) -> int:
        """Number of tasks of one micro-batch."""
        return len(self.rank_of)

    @property
    def num_ops(self) -> int:
        """Number of ops of the step."""
        return self.durations_us.size

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.limits_bytes)

    @property
    def most_ops(self) -> int:
        """Ops of the rank that has most."""
        return self.num_microbatches * int(np.bincount(self.rank_of).max())

    def parts(self, counts: Sequence[int]) -> list[BatchProblem]:
        """Steps of so many of the micro-batches each, in order."""
        per_microbatch = ("durations_us", "held_bytes", "peak_bytes", "lags_us", "edge_bytes")
        return [
            replace(self, **{name: getattr(self, name)[end - count : end] for name in per_microbatch})
            for count, end in zip(counts, accumulate(counts), strict=True)
        ]

    @cached_property
    def roles(self) -> Integers:
        """int64[num_ranks, 3]: each rank's F, its B or I, and its W or -1. All -1 where a rank has other tasks."""
        roles = np.full((self.num_ranks, 3), -1)
        for rank in range(self.num_ranks):
            tasks = np.flatnonzero(self.rank_of == rank)
            choices = self.choice_of[tasks].tolist()
            if sorted(choices) not in ([0, 1], [0, 1, 2]):
                return np.full_like(roles, -1)
            roles[rank, [(1, 0, 2)[choice] for choice in choices]] = tasks
        return roles

    @property
    def mean_held_bytes(self) -> Floats:
        """float64[num_ranks]: what a rank holds of a micro-batch, on average."""
        held = np.zeros(self.num_ranks)
        np.add.at(held, self.rank_of, np.maximum(self.held_bytes, 0).mean(axis=0))
        return held

    @property
    def has_one_stage_per_rank(self) -> bool:
        """Whether each rank has one F, one B or I, and at most one W."""
        return bool((self.roles[:, :2] >= 0).all())

    @property
    def has_weights(self) -> bool:
        """Whether the backward is split."""
        return bool((self.choice_of == 2).any())

    @cached_property
    def tables(self) -> Tables:
        """For compiled loops."""
        first_in, in_edge = _grouped(self.edges[:, 1], self.num_tasks)
        first_out, out_edge = _grouped(self.edges[:, 0], self.num_tasks)
        first_on, on = _grouped(self.rank_of, self.num_ranks)
        for begin, end in pairwise(first_on.tolist()):
            on[begin:end] = on[begin:end][::-1].copy()
        loads = self.tails_us.copy()
        np.add.at(loads, self.rank_of, self.durations_us.sum(axis=0))
        return Tables(
            self.durations_us,
            self.held_bytes,
            self.peak_bytes,
            self.lags_us,
            self.rank_of,
            self.choice_of,
            first_in,
            in_edge,
            self.edges[in_edge, 0],
            first_out,
            self.edges[out_edge, 1],
            first_on,
            on,
            self.tails_us,
            loads,
        )


def _grouped(keys: Integers, count: int) -> tuple[Integers, Integers]:
    """(first, entries): the indices into `keys` that have each key, in order."""
    first = np.searchsorted(np.sort(keys), np.arange(count + 1)).astype(np.int64)
    return first, np.argsort(keys, kind="stable").astype(np.int64)
