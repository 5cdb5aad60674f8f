"""Earliest, latest, slack and cycles of the task graph against brute force on small random graphs."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from rota.core.taskgraph import CycleError, Earliest, TaskGraph
from support.sampling import some

Inputs = list[list[tuple[int, int]]]


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


@given(graphs())
@settings(max_examples=some(200))
def test_slack_is_how_much_longer_a_node_may_take(graph: TaskGraph) -> None:
    earliest = graph.earliest()
    latest = graph.latest_ends(earliest)
    for node, slack in enumerate(slack_us(graph, earliest)):
        assert latest[node] == earliest.ends_us[node] + slack
        assert makespan(graph, node, slack) == makespan(graph) < makespan(graph, node, slack + 1)


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
