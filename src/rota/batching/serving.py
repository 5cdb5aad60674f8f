"""Plans batch after batch for a run that does not wait: searched, or by rules until the search's loops are compiled."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, final

from rota.batching.by_name import plan_replicas_by_name
from rota.batching.figures import Layout, Place
from rota.batching.policies import valley
from rota.batching.replicas import plan_replicas
from rota.batching.result import BatchPlan
from rota.batching.windows import sequence_bound_us
from rota.core.cluster import Cluster
from rota.core.sizes import Size, SizeModel

_LOADING_S = 2.0  # more than loops need that an earlier process has compiled


class Served(NamedTuple):
    """A batch's plans, one per replica; `is_searched`: not by rules alone."""

    replicas: tuple[BatchPlan, ...]
    is_searched: bool


@final
class BatchServer:
    """Compiles the loops of the search in a thread, for a minute once on a machine, and answers meanwhile.

    Args:
        model: As in `plan_replicas`.
        cluster: As in `plan_replicas`.
        packed: As in `plan_replicas`.
        place: As in `plan_replicas`.
        tries: As in `plan_replicas`.
    """

    def __init__(
        self, model: SizeModel, cluster: Cluster, *, packed: bool, place: Place, tries: int | None = None
    ) -> None:
        self._model, self._cluster, self._packed, self._place, self._tries = model, cluster, packed, place, tries
        self._compiled = threading.Event()
        threading.Thread(target=self._compile, name="rota: compiling loops", daemon=True).start()

    def compiles(self) -> bool:
        """Whether loops are still being compiled, after a time in which they would have been loaded."""
        return not self._compiled.wait(_LOADING_S)

    def plan(self, lengths: Sequence[int], num_replicas: int) -> Served:
        """The batch's plans. Raises as `plan_replicas` does."""
        if not self._compiled.is_set():
            found = plan_replicas_by_name(
                self._model, self._cluster, lengths, num_replicas, packed=self._packed, place=self._place
            )
            if found is not None:
                return Served(found, is_searched=False)
            self._compiled.wait()
        return Served(self._search(self._cluster, lengths, num_replicas, self._tries), is_searched=True)

    def _search(
        self, cluster: Cluster, lengths: Sequence[int], num_replicas: int, tries: int | None
    ) -> tuple[BatchPlan, ...]:
        return plan_replicas(
            self._model, cluster, lengths, num_replicas, packed=self._packed, place=self._place, tries=tries
        )

    def _compile(self) -> None:
        """Use every loop once, on a batch that is so small that all ways of the search are tried."""
        without_limits = replace(self._cluster, limit_bytes=(None,) * self._cluster.num_ranks)
        with suppress(Exception):  # then the first search compiles, and shows the error
            self._search(without_limits, [1, 2, 3, 5] * self._cluster.num_ranks, 1, None)
            problem = Layout.of(self._model, self._cluster, self._place).problem([Size(1, 1), Size(2, 4)])
            if problem.has_one_stage_per_rank:  # else, or if another bound is as high, no search asks for this one
                sequence_bound_us(problem, valley(problem), 0, 1)
        self._compiled.set()
