"""The processes of a run on several nodes, as node 0 starts them: all of them, or those left with a backup plan."""

from __future__ import annotations

import time
from collections.abc import Set
from typing import final

from rota.backups import Backups
from rota.errors import PlacementError, PlanError
from rota.plan import Plan
from rota.runtime.kept_memory import KeptMemories, State
from rota.runtime.launching.leader import Leader
from rota.runtime.launching.newest_states import Losses
from rota.runtime.launching.node_starts import Start
from rota.runtime.launching.nodes import Nodes
from rota.runtime.launching.present import Present


@final
class NodeCrew:
    """What `Crew` is on one machine.

    Args:
        plan: of each replica.
        sizes: pp, dp and tp.
        memories: of this node's processes.
        nodes: which node this is.
        leader: the other nodes.
        backups: plans for the loss of ranks, see `Present`.
        rejoin_after_s: how long the others go on before lost ranks are started again; None: for ever.
    """

    former_plan = None

    def __init__(
        self,
        plan: Plan,
        sizes: tuple[int, int, int],
        memories: KeptMemories,
        nodes: Nodes,
        leader: Leader,
        backups: Backups | None,
        rejoin_after_s: float | None,
    ) -> None:
        self._sizes, self._memories, self._nodes, self._leader = sizes, memories, nodes, leader
        self._num_processes = sizes[0] * sizes[1] * sizes[2]
        self._present = Present(plan, self._num_processes, sizes[1], backups)
        self._has_backups, self._rejoin_after_s = backups is not None, rejoin_after_s
        self._losses = Losses()
        self._new: set[int] = set()  # processes that were lost once
        self._rejoin_at_s: float | None = None
        self._start = Start(0, self._present.members)

    @property
    def plan(self) -> Plan:
        """What the ranks run now."""
        return self._present.plan

    def prepare(self, number: int) -> list[int]:
        """Decide on the start with this number; returns the ranks of this node."""
        plan = None if self._present.is_whole else self.plan
        new = sorted(self._new.intersection(self._present.members))
        self._start = Start(number, self._present.members, new, plan)
        self._leader.prepare(self._start)
        return [*self._here]

    def begin(self) -> None:
        """Let the other nodes start their ranks. Raises NodeLost."""
        self._leader.start()

    @property
    def _here(self) -> dict[int, int]:
        return self._start.ranks_on(self._nodes.node, self._nodes, self._num_processes)

    def environments(self, folder: str) -> list[dict[str, str]]:
        """The variables of each rank of this node."""
        return self._start.environments(self._nodes, self._sizes, folder, self._leader.own_address)

    def files_of_start(self) -> list[list[int]]:
        """The memory of each rank of this node; empty if none is kept."""
        return [[self._memories.files[number]] for number in self._here.values()] if self._memories.files else []

    def states(self) -> set[State]:
        """The states that all ranks hold in memory whose nodes are there, but for new ranks that hold none yet."""
        held = {**self._leader.held, **dict(enumerate(self._memories.held()))}
        there = [member for member in self._start.members if self._leader.can_start_on(self._node_of(member))]
        of_ranks = [held.get(member, set()) for member in there]
        is_new = [member in self._start.new for member in there]
        voting = [states for states, new in zip(of_ranks, is_new, strict=True) if states or not new]
        return set.intersection(*voting) if voting else set()

    # --- losses ---------------------------------------------------------------------------------------------------

    def lose(self, number: int | None, states: Set[State]) -> str | None:
        """Give up the rank with this number in the last start; see `Crew.lose`."""
        if number is None or not self._has_backups or not self._losses.have_come_further(states):
            return None
        lost = self._start.members[number]
        try:
            self._present.lose([lost])
        except (PlacementError, PlanError):
            return None
        self._set_lost([lost])
        return f"the others go on without {self._present.place_of(lost)}: {self._present.makespans()}"

    def lose_node(self, node: int, states: Set[State]) -> str:
        """Go on without all ranks of a node; returns who does their work, for people.

        Raises:
            PlacementError, PlanError: the others cannot.
        """
        self._losses.have_come_further(states)
        lost = [member for member in self._present.members if self._node_of(member) == node]
        if not lost:
            return "it had no ranks any more"
        self._present.lose(lost)
        self._set_lost(lost)
        who = f"ranks {_listed(sorted(lost))} are done by their"
        if len(lost) == 1:
            who = f"rank {lost[0]} is done by its"
        return f"its {who} peers: {self._present.makespans()}"

    def _node_of(self, member: int) -> int:
        return self._nodes.node_of(member, self._num_processes)

    def _set_lost(self, lost: list[int]) -> None:
        for member in lost:
            if self._node_of(member) == self._nodes.node:
                self._memories.forget(member)
        self._new.update(lost)
        self._set_rejoining()

    def _set_rejoining(self) -> None:
        self._rejoin_at_s = None if self._rejoin_after_s is None else time.monotonic() + self._rejoin_after_s

    @property
    def rejoin_at_s(self) -> float | None:
        """When lost ranks are to be started again (monotonic clock), None while there are none that can be."""
        return self._rejoin_at_s if self._coming_back() else None

    def _coming_back(self) -> list[int]:
        return [member for member in self._present.missing if self._leader.can_start_on(self._node_of(member))]

    def rejoin(self) -> str:
        """Take back all lost ranks whose nodes are there; returns what happens, for people."""
        if not (coming_back := self._coming_back()):  # their node was lost again while the others ended
            return "the ranks that were to join again are lost"
        try:
            return self._present.rejoin(coming_back)
        except (PlacementError, PlanError) as error:  # there is no plan without those that are still missing
            self._set_rejoining()
            return f"lost ranks cannot join again yet: {error}"


def _listed(numbers: list[int]) -> str:
    """In a few words."""
    first, last = numbers[0], numbers[-1]
    return f"{first} to {last}" if numbers == [*range(first, last + 1)] else ", ".join(map(str, numbers))
