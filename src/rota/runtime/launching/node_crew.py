"""The processes of a run on several nodes, as node 0 starts them: always all of them, with the run's own plan."""

from __future__ import annotations

from typing import final

from rota.plan import Plan
from rota.runtime.environment import mesh_environment
from rota.runtime.kept_memory import KeptMemories, State
from rota.runtime.launching.leader import Leader
from rota.runtime.launching.meeting_store import address
from rota.runtime.launching.nodes import Nodes


@final
class NodeCrew:
    """What `Crew` is on one machine. `memories` are those of this node's processes."""

    rejoin_at_s = None
    former_plan = None

    def __init__(
        self, plan: Plan, sizes: tuple[int, int, int], memories: KeptMemories, nodes: Nodes, leader: Leader
    ) -> None:
        self.plan, self._sizes, self._memories = plan, sizes, memories
        self._nodes, self._leader = nodes, leader
        self._num_processes = sizes[0] * sizes[1] * sizes[2]

    def environments(self, folder: str) -> list[dict[str, str]]:
        """The variables of each process of this node for the next start."""
        store = address(folder, self._leader.num_start)
        each = self._nodes.environments(store, self._num_processes, self._leader.own_address)
        return [mesh_environment(*self._sizes) | of_rank for of_rank in each]

    def files_of_start(self) -> list[list[int]]:
        """The memory of each process of this node; empty if none is kept."""
        return [[file] for file in self._memories.files]

    def states(self) -> set[State]:
        """The states that all processes of all nodes hold in memory."""
        return self._memories.common_states(range(len(self._memories.files))) & self._leader.states

    def lose(self, *_: object) -> str | None:
        """No rank can be given up."""
        return None

    def rejoin(self) -> str:
        """Nobody is ever missing."""
        raise AssertionError
