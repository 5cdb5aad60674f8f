"""Who is started on which node, after losses of ranks and of nodes: 3 replicas of 2 ranks on 2 nodes or on 3."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rota.errors import PlacementError
from rota.reading import Field
from rota.runtime.kept_memory import KeptMemories, State
from rota.runtime.launching.node_crew import NodeCrew
from rota.runtime.launching.node_starts import Start
from rota.runtime.launching.nodes import Nodes

from .test_crew import PLAN, backups_of, keep


class OtherNodes:
    """What a leader knows of them."""

    own_address = "127.0.0.1"

    def __init__(self) -> None:
        self.held: dict[int, set[State]] = {}
        self.started: list[Start] = []
        self.gone: set[int] = set()

    def prepare(self, start: Start) -> None:
        self.prepared = start

    def start(self) -> None:
        self.started.append(self.prepared)

    def can_start_on(self, node: int) -> bool:
        return node not in self.gone


def crew_of(num_nodes: int, leader: OtherNodes, memories: KeptMemories, rejoin_after_s: float | None = 5) -> NodeCrew:
    nodes = Nodes(num_nodes, 0, "127.0.0.1", 5, b"")
    sizes = (2, 3, 1)
    return NodeCrew(PLAN, sizes, memories, nodes, leader, backups_of(PLAN, 3), rejoin_after_s)  # type: ignore[arg-type]


def test_ranks_of_both_nodes_are_lost_and_join_again(tmp_path: Path) -> None:
    """Node 0 has replica 0 and rank 0 of replica 1, node 1 the others."""
    leader = OtherNodes()
    with KeptMemories(3) as memories:
        crew = crew_of(2, leader, memories)
        assert crew.prepare(0) == [0, 1, 2]
        crew.begin()
        assert leader.started == [Start(0, [*range(6)], [], None)]
        assert {one["ROTA_MESH"] for one in crew.environments(str(tmp_path))} == {"3 2 1"}
        assert crew.states() == set()
        for file in memories.files:
            keep(file, 7, b"seven")
        leader.held = {3: {State(0, 7), State(0, 8)}, 4: {State(0, 7)}, 5: {State(0, 6), State(0, 7)}}
        assert crew.states() == {State(0, 7)}
        before_s = time.monotonic()
        assert crew.lose(3, crew.states()) is not None  # rank 1 of replica 1, on node 1
        assert crew.rejoin_at_s is not None
        assert crew.rejoin_at_s >= before_s + 5

        assert crew.prepare(1) == [0, 1, 2]  # process 2 is the first rank
        crew.begin()
        assert leader.started[-1] == Start(1, [2, 0, 1, 4, 5], [], backups_of(PLAN, 3).backups[1].plan)
        left = crew.environments(str(tmp_path))
        assert [(one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"]) for one in left] == [
            ("0", "2", "5"),
            ("1", "0", "5"),
            ("2", "1", "5"),
        ]
        assert {one["ROTA_MESH"] for one in left} == {"1 5 1"}
        assert {one["LOCAL_WORLD_SIZE"] for one in left} == {"3"}
        assert not any("ROTA_NEW" in one for one in left)
        assert crew.files_of_start() == [[memories.files[2]], [memories.files[0]], [memories.files[1]]]
        assert crew.lose(0, {State(0, 7)}) is None  # no step was done since: the script is at fault
        assert crew.lose(None, {State(0, 9)}) is None  # a hang

        leader.held = {4: {State(0, 7)}, 5: {State(0, 7)}}
        told = crew.lose(1, {State(0, 9)})  # process 0, on this node
        assert told is not None
        assert told.startswith("the others go on without rank 0 of replica 0: makespan ")
        crew.prepare(2)
        assert crew.rejoin() == "rank 1 of replica 1 and rank 0 of replica 0 join again"
        assert crew.prepare(3) == [0, 1, 2]
        crew.begin()
        assert leader.started[-1] == Start(3, [*range(6)], [0, 3], None)
        assert [("ROTA_NEW" in one) for one in crew.environments(str(tmp_path))] == [True, False, False]
        assert crew.rejoin_at_s is None
        assert crew.states() == {State(0, 7)}  # new ranks hold nothing yet
        leader.held[3] = {State(0, 5)}
        assert crew.states() == set()


def test_a_node_that_is_lost_with_its_ranks_has_no_vote_and_does_not_join() -> None:
    """Its ranks fail, and while all are ended, so does the node: what the others hold is how far the run has come."""
    leader = OtherNodes()
    with KeptMemories(3) as memories:
        crew = crew_of(2, leader, memories)
        crew.prepare(0)
        for file in memories.files:
            keep(file, 7, b"seven")
        leader.held = {member: {State(0, 7)} for member in (3, 4, 5)}
        assert crew.lose(3, crew.states()) is not None
        crew.prepare(1)
        leader.held, leader.gone = {}, {1}
        assert crew.states() == {State(0, 7)}
        assert crew.rejoin() == "the ranks that were to join again are lost"
        crew.prepare(2)
        assert leader.prepared.members == [2, 0, 1, 4, 5]


def test_nodes_are_lost_until_a_stage_is_nowhere_and_come_back_one_by_one() -> None:
    leader = OtherNodes()
    with KeptMemories(2) as memories:
        crew = crew_of(3, leader, memories)
        crew.prepare(0)
        leader.gone = {2}
        assert crew.lose_node(2, set()).startswith("its ranks 4 to 5 are done by their peers: makespan ")
        assert crew.rejoin_at_s is None  # nobody to start it on
        assert crew.lose(0, {State(0, 3)}) is not None  # rank 0 of replica 0, first in the plan of those left
        assert crew.rejoin_at_s is not None
        crew.prepare(1)
        leader.gone = {1, 2}
        with pytest.raises(
            PlacementError, match="rank 0 is lost in every replica, so nobody has the weights of stage 0"
        ):
            crew.lose_node(1, {State(0, 4)})

        leader.gone = {2}
        assert crew.rejoin() == "rank 0 of replica 0 joins again"
        crew.prepare(2)
        crew.begin()
        assert sorted(leader.started[-1].members) == [0, 1, 2, 3]
        assert leader.started[-1].new == [0]
        assert crew.rejoin_at_s is None
        leader.gone = set()
        assert crew.rejoin_at_s is not None
        assert crew.rejoin() == "rank 0 of replica 2 and rank 1 of replica 2 join again"
        crew.prepare(3)
        crew.begin()
        assert leader.started[-1] == Start(3, [*range(6)], [0, 4, 5], None)


def test_ranks_wait_on_if_there_is_no_plan_without_those_still_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    leader = OtherNodes()
    with KeptMemories(2) as memories:
        crew = crew_of(3, leader, memories)
        crew.prepare(0)
        leader.gone = {2}
        crew.lose_node(2, set())
        assert crew.lose(0, {State(0, 3)}) is not None
        members, former_s = crew._present.members, crew.rejoin_at_s

        def refuse(*_: object) -> None:
            raise PlacementError("no plan fits in memory")

        monkeypatch.setattr("rota.runtime.launching.present.plan_backup", refuse)
        assert crew.rejoin() == "lost ranks cannot join again yet: no plan fits in memory"
        assert crew._present.members == members
        assert former_s is not None
        assert crew.rejoin_at_s is not None
        assert crew.rejoin_at_s > former_s  # else the others are ended again at once
        leader.gone = set()
        assert "join again" in crew.rejoin()  # the run's own plan


def test_a_node_that_loses_its_last_rank_is_lost_without_harm() -> None:
    leader = OtherNodes()
    with KeptMemories(2) as memories:
        crew = crew_of(3, leader, memories, rejoin_after_s=None)
        crew.prepare(0)
        assert crew.lose(2, {State(0, 1)}) is not None
        crew.prepare(1)
        assert crew.lose(0, {State(0, 2)}) is not None
        crew.prepare(2)
        assert crew.rejoin_at_s is None
        assert crew.lose_node(1, {State(0, 2)}) == "it had no ranks any more"


def test_a_start_is_told_with_its_plan() -> None:
    for start in (Start(4, (2, 0), (0,), PLAN), Start(5, (0, 1))):
        assert Start.from_message(Field("message", start.to_fields())) == start
