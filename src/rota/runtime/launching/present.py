"""Which processes of a run with replicas are present, and what they run while others are missing.

all ranks ──some are lost──▶ those left, a backup plan ──they come back──▶ all ranks, the run's own plan

A lost rank's memory is gone. When it comes back its state is that of a peer: a copy of the peer's memory on the same
machine, otherwise the ranks themselves send it, see `checkpoints.peers`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import final

from rota.backups import Backups, Place, plan_backup, survivors
from rota.errors import PlacementError
from rota.plan import Plan
from rota.simulation import simulate
from rota.units import time_text


@final
class Present:
    """The processes of the next start. Processes are numbered replica after replica, and within one by rank.

    Args:
        plan: of each replica.
        num_processes: of the whole run.
        dp: replicas of the pipeline.
        backups: plans for the loss of each rank of `plan`; None: none can be lost.
    """

    def __init__(self, plan: Plan, num_processes: int, dp: int, backups: Backups | None) -> None:
        self._base, self._num_processes, self._dp, self._backups = plan, num_processes, dp, backups
        self._lost: list[Place] = []
        #: What the processes run, and each one's number among all of the run.
        self.plan = plan
        self.members = [*range(num_processes)]

    @property
    def is_whole(self) -> bool:
        """Whether nobody is missing."""
        return not self._lost

    @property
    def missing(self) -> list[int]:
        """The numbers of the processes that are lost."""
        return [replica * self._base.num_ranks + rank for replica, rank in self._lost]

    def peer_of(self, member: int) -> int:
        """A process that is present and has the same stages as one that is lost."""
        num_ranks = self._base.num_ranks
        found: int = next(other for other in self.members if other % num_ranks == member % num_ranks)
        return found

    def lose(self, members: Collection[int]) -> None:
        """Go on without these processes.

        Raises:
            PlacementError: a stage is left on no rank, or there are no backup plans.
            PlanError: no plan fits in memory.
        """
        if self._backups is None:
            raise PlacementError("no other rank has their stages without --backups")
        self._set_lost([*self._lost, *map(self._place, members)])

    def _place(self, member: int) -> Place:
        return Place(*divmod(member, self._base.num_ranks))

    def place_of(self, member: int) -> str:
        """Where a process is, for people."""
        place = self._place(member)
        return f"rank {place.rank} of replica {place.replica}"

    def makespans(self) -> str:
        """What the loss costs, for people."""
        after, before = (time_text(simulate(one).makespan_us) for one in (self.plan, self._base))
        return f"makespan {after}, with all ranks {before}"

    def _set_lost(self, lost: list[Place]) -> None:
        plan = self._plan_without(lost)
        self._lost, self.plan = lost, plan
        left = survivors(self._base.num_ranks, self._dp, lost)
        self.members = [replica * self._base.num_ranks + rank for replica, rank in left]
        if not lost:
            self.members = [*range(self._num_processes)]

    def _plan_without(self, lost: list[Place]) -> Plan:
        if not lost:
            return self._base
        if len(lost) == 1 and self._backups is not None:
            return self._backups.backups[lost[0].rank].plan
        return plan_backup(self._base, self._dp, lost)

    def rejoin(self, members: Collection[int]) -> str:
        """Take back these processes, which were lost; returns what happens, for people."""
        *names, last = [self.place_of(member) for member in self.missing if member in members]
        where = f"{', '.join(names)} and {last}" if names else last
        self._set_lost([place for place, member in zip(self._lost, self.missing, strict=True) if member not in members])
        return f"{where} {'joins' if len(members) == 1 else 'join'} again"
