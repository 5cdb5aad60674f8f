"""Earliest, latest, slack and cycles of the task graph against brute force on small random graphs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from rota.core.taskgraph import CycleError, Earliest, TaskGraph
from support.sampling import some

Inputs = list[list[tuple[int, int]]]

guesses = st.lists(st.integers(-1, 7), max_size=12)  #: of `earliest`: some nodes, some of them twice, and none


@st.composite
def graphs(draw: st.DrawFn, cyclic: bool = False) -> TaskGraph:
    """1 to 8 nodes with edges between any two (`cyclic`), or only along a hidden random order; some are `previous`."""
    n = draw(st.integers(1, 8))
    place = draw(st.permutations(range(n)))
    pairs = [(a, b) for a in range(n) for b in range(n) if cyclic or place[a] < place[b]]
    inputs: Inputs = [[] for _ in range(n)]
    if pairs:
        for a, b in draw(st.lists(st.sampled_from(pairs), max_size=14)):
            inputs[b].append((a, draw(st.integers(0, 5))))
    graph = TaskGraph.of(draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)), inputs)
    previous = [-1] * n
    if pairs:
        for a, b in draw(st.lists(st.sampled_from(pairs), max_size=n)):
            if a not in previous:
                previous[b] = a
    return replace(graph, previous=previous)


def inputs_of(graph: TaskGraph) -> Inputs:
    return [[*graph.inputs(node)] for node in range(len(graph.durations_us))]


def paths_to(graph: TaskGraph, node: int) -> list[int]:
    """The length of every path that ends with `node`."""
    before = [length + lag for source, lag in graph.inputs(node) for length in paths_to(graph, source)]
    return [graph.durations_us[node] + length for length in [0, *before]]


def makespan(graph: TaskGraph, node: int = 0, longer_us: int = 0) -> int:
    """The longest path of all if `node` takes longer."""
    durations = list(graph.durations_us)
    durations[node] += longer_us
    return max(max(paths_to(replace(graph, durations_us=durations), end)) for end in range(len(durations)))


def slack_us(graph: TaskGraph, earliest: Earliest) -> list[int]:
    """How much each node alone may be delayed."""
    return [late - end for late, end in zip(graph.latest_ends(earliest), earliest.ends_us, strict=True)]


@given(graphs(), guesses)
@settings(max_examples=some(200))
def test_each_node_ends_with_the_longest_path_to_it(graph: TaskGraph, guess: list[int]) -> None:
    earliest = graph.earliest(node for node in guess if node < len(graph.durations_us))
    for node, duration in enumerate(graph.durations_us):
        assert earliest.ends_us[node] == max(paths_to(graph, node)) == earliest.starts_us[node] + duration
    position = {node: i for i, node in enumerate(earliest.sequence)}
    assert len(position) == len(graph.durations_us)
    assert all(position[before] < position[node] for node, edges in enumerate(inputs_of(graph)) for before, _ in edges)


@given(graphs())
@settings(max_examples=some(200))
def test_slack_is_how_much_longer_a_node_may_take(graph: TaskGraph) -> None:
    earliest = graph.earliest()
    latest = graph.latest_ends(earliest)
    for node, slack in enumerate(slack_us(graph, earliest)):
        assert latest[node] == earliest.ends_us[node] + slack
        assert makespan(graph, node, slack) == makespan(graph) < makespan(graph, node, slack + 1)


@given(graphs())
@settings(max_examples=some(200))
def test_the_critical_path_is_a_chain_without_gaps_or_slack(graph: TaskGraph) -> None:
    earliest = graph.earliest()
    starts, ends = earliest.starts_us, earliest.ends_us
    path = graph.critical_path(starts, ends)
    assert starts[path[0]] == 0
    assert ends[path[-1]] == makespan(graph)
    for before, node in pairwise(path):
        assert starts[node] - ends[before] in [lag for source, lag in graph.inputs(node) if source == before]
    slack = slack_us(graph, earliest)
    assert all(slack[node] == 0 for node in path)


@given(graphs(cyclic=True), guesses)
@settings(max_examples=some(200))
def test_a_cycle_is_found_and_told_as_who_waits_for_whom(graph: TaskGraph, guess: list[int]) -> None:
    guess = [node for node in guess if node < len(graph.durations_us)]
    if not has_cycle(graph):
        assert len(graph.earliest(guess).sequence) == len(graph.durations_us)
        return
    with pytest.raises(CycleError) as caught:
        graph.earliest(guess)
    nodes = caught.value.nodes
    assert len(set(nodes)) == len(nodes)
    for node, awaited in zip(nodes, nodes[1:] + nodes[:1], strict=True):
        assert awaited in [before for before, _ in graph.inputs(node)]
    assert str(nodes) in str(caught.value)


def has_cycle(graph: TaskGraph) -> bool:
    """Whether nodes are left when those that wait for nobody left are taken away, again and again."""
    left = set(range(len(graph.durations_us)))
    while free := {node for node in left if not any(before in left for before, _ in graph.inputs(node))}:
        left -= free
    return bool(left)


@st.composite
def served_graphs(draw: st.DrawFn) -> tuple[TaskGraph, dict[int, tuple[int, ...]]]:
    """A graph, and of some nodes the servers. What is served takes time."""
    graph = draw(graphs())
    which = st.lists(st.integers(0, 2), max_size=2, unique=True).map(tuple)
    servers = {node: draw(which) for node in range(len(graph.durations_us))}
    served = {node: found for node, found in servers.items() if found}
    durations = [max(us, 1) if node in served else us for node, us in enumerate(graph.durations_us)]
    return replace(graph, durations_us=durations), served


@given(served_graphs())
@settings(max_examples=some(300))
def test_who_comes_first_is_served_first(given_graph: tuple[TaskGraph, dict[int, tuple[int, ...]]]) -> None:
    graph, served = given_graph
    earliest = graph.first_come(served)
    starts, ends = earliest.starts_us, earliest.ends_us
    ready = [max([0, *(ends[before] + lag for before, lag in inputs)]) for inputs in inputs_of(graph)]
    for node, duration in enumerate(graph.durations_us):
        assert ends[node] == starts[node] + duration
        others = [other for other in served if other != node and {*served[other]} & {*served.get(node, ())}]
        earlier = [other for other in others if (ready[other], other) < (ready[node], node)]
        assert starts[node] == max([ready[node], *(ends[other] for other in earlier)])
    position = {node: i for i, node in enumerate(earliest.sequence)}
    assert len(position) == len(graph.durations_us)
    assert all(position[before] < position[node] for node, edges in enumerate(inputs_of(graph)) for before, _ in edges)


def test_a_cycle_beside_servers_is_found() -> None:
    with pytest.raises(CycleError):
        TaskGraph.of([1, 1, 1], [[(1, 0)], [(0, 0)], []]).first_come({2: (0,)})


def test_no_nodes() -> None:
    graph = TaskGraph.of([], [])
    earliest = graph.earliest()
    assert (earliest.starts_us, earliest.ends_us, earliest.sequence) == ([], [], [])
    assert slack_us(graph, earliest) == graph.critical_path([], []) == []


def test_long_chains_need_no_recursion() -> None:
    n = 20_000
    graph = TaskGraph.of([1] * n, [[(i + 1, 0)] if i + 1 < n else [] for i in range(n)])
    assert graph.earliest().ends_us[0] == n
