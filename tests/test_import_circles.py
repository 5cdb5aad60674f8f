"""No module of a room reaches itself through imports, not even in a function or for a type checker."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter

import pytest

from test_layers import MODULES, imports

ROOMS = ("rota.cli", "rota.compat.varuna", "rota.interop", "rota.models", "rota.planning", "rota.profiling")


def circle(graph: dict[str, set[str]]) -> list[str]:
    """One circle of a graph of imports; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_no_circle(room: str) -> None:
    inside = {name for name in MODULES if name == room or name.startswith(f"{room}.")}
    graph = {
        name: {target for target, _ in imports(ast.parse(MODULES[name].read_text())) if target in inside - {name}}
        for name in inside
    }
    assert sum(map(len, graph.values())) > 3, "the room's imports are not seen"
    assert circle(graph) == []


def test_a_circle_is_found() -> None:
    assert sorted(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})[1:]) == ["a", "b", "c"]
