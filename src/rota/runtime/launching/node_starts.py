"""One start of the ranks of a run on several nodes, as node 0 decides it and tells the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rota.plan import Plan
from rota.reading import Field
from rota.runtime.environment import mesh_environment, new_environment
from rota.runtime.launching.meeting_store import address
from rota.runtime.launching.nodes import Nodes


class Start(NamedTuple):
    """What all nodes know of a start.

    Attributes:
        number: of the start.
        members: each rank's number among all processes of the run; not all of them while some are missing.
        new: the processes that were missing before, so that their memory may be empty.
        plan: what the ranks run instead of the run's own plan.
    """

    number: int
    members: Sequence[int]
    new: Sequence[int] = ()
    plan: Plan | None = None

    def to_fields(self) -> dict[str, Any]:
        """The fields of a message."""
        plan = None if self.plan is None else self.plan.to_json()
        return {"number": self.number, "members": [*self.members], "new": [*self.new], "plan": plan}

    @classmethod
    def from_message(cls, message: Field) -> Start:
        """Read what `to_fields` wrote. Raises FormatError, PlacementError, PlanError."""
        plan = None if message["plan"].value is None else Plan.from_json(message["plan"].text())
        number, members, new = message["number"].integer(0), message["members"].integers(0), message["new"].integers(0)
        return cls(number, members, new, plan)

    def ranks_on(self, node: int, nodes: Nodes, num_processes: int) -> dict[int, int]:
        """The ranks of a node, and the number that each process has there in the whole run."""
        numbers = nodes.numbers(node, num_processes)
        return {rank: member - numbers.start for rank, member in enumerate(self.members) if member in numbers}

    def environments(
        self, nodes: Nodes, sizes: tuple[int, int, int], folder: str, own_address: str
    ) -> list[dict[str, str]]:
        """The variables of each rank of this node.

        Args:
            nodes: which node this is.
            sizes: pp, dp and tp of the run.
            folder: of this node's run.
            own_address: by which the other nodes reach this one.
        """
        num_processes = sizes[0] * sizes[1] * sizes[2]
        here = self.ranks_on(nodes.node, nodes, num_processes)
        of_all = mesh_environment(*(sizes if self.plan is None else (self.plan.num_ranks, 1, 1)))
        each = nodes.environments(address(folder, self.number), len(self.members), here, own_address)
        return [
            of_all | of_rank | (new_environment() if self.members[rank] in self.new else {})
            for rank, of_rank in zip(here, each, strict=True)
        ]
