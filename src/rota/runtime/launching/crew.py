"""Who is there: all processes of a run, or those that go on while a lost one has not been replaced.

With replicas and backup plans, see `present`. Without replicas, those left run the same stages on fewer ranks, and each
takes what it needs of the state from the memories of all ranks before, which are set aside until a step is committed on
the new plan:

all ranks ──a rank is given up──▶ those left, planned again ──after a while──▶ all ranks, the run's own plan
memories are set aside            load from them                              load from theirs
"""

from __future__ import annotations

import time
from collections.abc import Set
from typing import final

from rota.backups import Backups
from rota.errors import PlacementError, PlanError
from rota.plan import Plan
from rota.replanning import replan
from rota.runtime.environment import meeting_environments, mesh_environment
from rota.runtime.kept_memory import KeptMemories, State, common_states
from rota.runtime.launching.newest_states import Losses
from rota.runtime.launching.present import Present
from rota.simulation import simulate
from rota.units import time_text


@final
class Crew:
    """The processes of the next start, their plan and their memories.

    Processes are numbered replica after replica, and within one by rank and TP shard. A lost rank's work is
    done by its peers, by `backups`, or by all others, as long as `min_ranks` are left; if both are None, no rank can be
    given up. `rejoin_after_s`: for how long the others go on before a lost rank is started again; None: for ever.
    """

    def __init__(
        self,
        plan: Plan,
        dp: int,
        tp: int,
        memories: KeptMemories,
        backups: Backups | None = None,
        rejoin_after_s: float | None = 60.0,
        min_ranks: int | None = None,
    ) -> None:
        self._base, self._dp, self._tp = plan, dp, tp
        self._memories, self._backups, self._rejoin_after_s = memories, backups, rejoin_after_s
        self._min_ranks = min_ranks
        self._present = Present(plan, plan.num_ranks * dp * tp, dp, backups)
        self._lost: list[int] = []
        self._losses = Losses()
        #: What the processes run now, and each one's number among all of the run.
        self.plan = plan
        self.members = self._present.members
        self._rejoin_at_s: float | None = None
        #: What those ran whose memories are set aside; None if none are.
        self.former_plan: Plan | None = None

    def prepare(self, _: int) -> list[int]:
        """The ranks of the next start that are on this machine: all."""
        return [*range(len(self.members))]

    def begin(self) -> None:
        """There are no other nodes that start ranks."""

    @property
    def rejoin_at_s(self) -> float | None:
        """When all are to be started again (monotonic clock), None while nobody is missing."""
        return self._rejoin_at_s

    def environments(self, folder: str) -> list[dict[str, str]]:
        """The variables of each process of the next start, which keeps the device that it has in the whole run."""
        is_whole = not self._lost
        sizes = (self.plan.num_ranks, self._dp, self._tp) if is_whole else (self.plan.num_ranks, 1, 1)
        each = meeting_environments(folder, len(self.members))
        of_all = mesh_environment(*sizes)
        return [
            of_all | of_rank | {"LOCAL_RANK": str(member)} for member, of_rank in zip(self.members, each, strict=True)
        ]

    def files_of_start(self) -> list[list[int]]:
        """The memory of each process of the next start, and those that are set aside; empty if none is kept."""
        is_on_this_plan = bool(self._memories.common_states(self.members))  # a step was committed on it
        if is_on_this_plan or not common_states(self._memories.former):  # or a checkpoint was loaded
            self._memories.drop_former()
            self.former_plan = None
        former = self._memories.former
        return [[self._memories.files[member], *former] for member in self.members] if self._memories.files else []

    def states(self) -> set[State]:
        """The states that all processes have in memory, or that are set aside."""
        return self._memories.common_states(self.members) | common_states(self._memories.former)

    def lose(self, number: int | None, states: Set[State]) -> str | None:
        """Give up the process with this number in the last start; all have ended. `states`: saved or in memory.

        Returns:
            What the others do now, for people; None if they cannot go on: they have no plan, or have done no step since
            the last loss, so that the script rather than a rank is at fault.
        """
        if number is None or not self._losses.have_come_further(states):
            return None
        if self._backups is None:
            return self._on_fewer(number)
        lost = self.members[number]
        try:
            self._present.lose([lost])
        except (PlacementError, PlanError):
            return None
        self._lost.append(lost)
        self.plan, self.members = self._present.plan, self._present.members
        self._memories.forget(lost)
        self._set_rejoining()
        return f"the others go on without {self._present.place_of(lost)}: {self._present.makespans()}"

    def _on_fewer(self, number: int) -> str | None:
        """Give up a process when there are no peers: all others run its stages, too."""
        num_ranks = self.plan.num_ranks - 1
        if self._min_ranks is None or num_ranks < self._min_ranks:
            return None
        try:
            plan = replan(self._base, num_ranks)
        except (PlacementError, PlanError):
            return None
        lost = self.members[number]
        self._set_aside()
        self.plan = plan
        self._lost.append(lost)
        self.members.remove(lost)
        self._set_rejoining()
        after, before = (time_text(simulate(one).makespan_us) for one in (plan, self._base))
        return f"the others go on without rank {lost}: makespan {after}, with all ranks {before}"

    def _set_aside(self) -> None:
        """Keep the memories of the plan that ran; those of the one before it if it has not committed a step."""
        if self._memories.common_states(self.members):
            self._memories.set_aside(self.members)
            self.former_plan = self.plan
            return
        for member in self.members:
            self._memories.forget(member)

    def _set_rejoining(self) -> None:
        self._rejoin_at_s = None if self._rejoin_after_s is None else time.monotonic() + self._rejoin_after_s

    def rejoin(self) -> str:
        """Take back all that are lost, each with its stages' state; returns what happens, for people."""
        lost, self._lost, self._rejoin_at_s = self._lost, [], None
        if self._backups is not None:
            if self._memories.files:
                for member in lost:
                    self._memories.copy(self._present.peer_of(member), member)
            what = self._present.rejoin(lost)
            self.plan, self.members = self._present.plan, self._present.members
            return what
        self._set_aside()
        self.plan, self.members = self._base, [*range(self._base.num_ranks)]
        return f"{' and '.join(f'rank {rank}' for rank in lost)} {'joins' if len(lost) == 1 else 'join'} again"
