"""AutoConfig: choose the number of stages and the micro-batch size by simulating Varuna's schedule on a profile."""

from __future__ import annotations

import math
from dataclasses import replace
from operator import add
from pathlib import Path
from typing import NamedTuple, final

from rota.compat.varuna.cutting import plan_of, stage_costs
from rota.compat.varuna.profiler import Profile
from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.errors import NothingFitsError, PlanError, SearchError
from rota.core.simulation import check, simulate


class _Choice(NamedTuple):
    step_us: int
    chunk_size: int


@final
class AutoConfig:
    """The fastest numbers of stages and micro-batch sizes, by simulating Varuna's schedule.

    For each number of stages there are as many replicas as fit and divide the batch. Pieces are cut as by `Varuna(…,
    costs=…)`.

    Args:
        num_gpus: Total number of ranks.
        gpus_per_vm: Ranks per node.
        batch_size: Examples of a step, over all replicas.
        num_pstages: Number of pieces that the profile must have; None: any number.
        profile_folder: The folder that `Profiler` wrote.
        gpu_memory_capacity: Bytes per rank; None: no limit.
        verbose: Whether to print what is tried.

    Raises:
        SearchError: A number is out of range, or, in `get_min`, nothing fits.
        FormatError: The profile cannot be read.
    """

    def __init__(
        self,
        num_gpus: int,
        gpus_per_vm: int,
        batch_size: int,
        num_pstages: int | None = None,
        profile_folder: str | Path = "profiles",
        gpu_memory_capacity: int | None = None,
        verbose: bool = True,
    ) -> None:
        if min(num_gpus, gpus_per_vm, batch_size) < 1:
            raise SearchError(f"{num_gpus} ranks, {gpus_per_vm} per node, batch of {batch_size}; give at least 1 each")
        self._num_gpus, self._per_node, self._batch_size = num_gpus, gpus_per_vm, batch_size
        self._limit_bytes, self._verbose = gpu_memory_capacity, verbose
        self._profile = Profile.load(Path(profile_folder))
        num_pieces = {costs.num_stages for costs in self._profile.costs.values()}
        if len(num_pieces) > 1 or num_pstages not in (None, *num_pieces):
            expected = "as many for each size" if num_pstages is None else f"{num_pstages}"
            raise SearchError(f"{profile_folder} is of {sorted(num_pieces)} pieces, not {expected}; profile again")
        depths = range(1, min(num_gpus, *num_pieces) + 1)
        self._choices = {depth: choice for depth in depths if (choice := self._best(depth)) is not None}
        #: Seconds of a step for each number of stages that fits, at its best micro-batch size.
        self.batch_times = {depth: choice.step_us / 1e6 for depth, choice in self._choices.items()}

    def get_min(self) -> tuple[int, int, float]:
        """(number of stages, micro-batch size, seconds of a step) of the fastest."""
        if not self._choices:
            raise NothingFitsError(
                f"nothing fits into {self._limit_bytes} bytes per rank; profile smaller micro-batches, or add ranks"
            )
        depth = min(self._choices, key=lambda depth: (self._choices[depth].step_us, depth))
        return depth, self._choices[depth].chunk_size, self.batch_times[depth]

    def num_replicas(self, num_stages: int) -> int:
        """The largest number of pipelines that the ranks allow and that divides the batch."""
        return max(n for n in range(1, self._num_gpus // num_stages + 1) if self._batch_size % n == 0)

    def _best(self, num_stages: int) -> _Choice | None:
        choices = []
        for size, costs in self._profile.costs.items():
            step_us = self._step_us(costs, num_stages, size)
            if step_us is not None:
                choices.append(_Choice(step_us, size))
            if self._verbose:
                result = "does not fit" if step_us is None else f"{step_us / 1e6:g} s"
                print(
                    f"{num_stages} stages x {self.num_replicas(num_stages)} replicas, {size} per micro-batch: {result}"
                )
        return min(choices, default=None)

    def _step_us(self, costs: Costs, num_stages: int, chunk_size: int) -> int | None:
        """Time of a step in µs; None if a rank's memory is too small."""
        replicas = self.num_replicas(num_stages)
        reduce_us = tuple(self._reduce_us(num_bytes, replicas) for num_bytes in self._profile.reduced_bytes)
        static_bytes = costs.static_bytes
        if replicas > 1:  # gradients are added up in buffers
            static_bytes = tuple(map(add, static_bytes, self._profile.reduced_bytes))
        costs = stage_costs(replace(costs, reduce_us=reduce_us, static_bytes=static_bytes), num_stages)
        num_microbatches = math.ceil(self._batch_size / replicas / chunk_size)
        plan = plan_of(num_stages, num_microbatches, costs, self._cluster(num_stages))
        try:
            check(plan)
        except PlanError as error:
            if error.reason != "memory":
                raise
            return None
        return simulate(plan).makespan_us

    def _cluster(self, num_stages: int) -> Cluster:
        far = [s for s in range(1, num_stages) if s % self._per_node == 0]
        links = [(*pair, self._profile.long_link) for s in far for pair in ((s - 1, s), (s, s - 1))]
        return Cluster((self._limit_bytes,) * num_stages, self._profile.link, tuple(links))

    def _reduce_us(self, num_bytes: int, replicas: int) -> int:
        """Time of a ring all-reduce: each replica sends 2 (n - 1) / n of the bytes."""
        if replicas == 1:
            return 0
        link = self._profile.long_link if self._num_gpus > self._per_node else self._profile.link
        return 2 * (replicas - 1) * link.transfer_us(-(-num_bytes // replicas))
