"""Arrows go one way: who may import what, inside rooms too, and that `import rota` stays light."""

from __future__ import annotations

import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import pytest

from support.layers import (
    CORE,
    HEAVY,
    MODULES,
    PAGE,
    ROOMS,
    complaints,
    contracted,
    imports_of,
    longest_chain,
    page,
)

MOST_FILES = 29  # in a chain of imports


def test_every_module_imports_only_what_its_row_allows() -> None:
    assert [
        line for module, path in MODULES.items() for line in complaints(module, path.read_text(encoding="utf-8"))
    ] == []


@pytest.mark.parametrize(
    ("module", "source", "told"),
    [
        ("rota.schedules.new", "import json\nfrom rota.core.plan import Plan\nfrom rota.core import reading", []),
        ("rota.schedules.new", "from rota.accounting import idle", ["rota.schedules.new imports rota.accounting"]),
        ("rota.core.plan", "from rota import Task", ["rota.core.plan imports rota"]),
        ("rota.core.plan", "class A:\n def f(self):\n  import numpy", ["rota.core.plan imports numpy in a function"]),
        ("rota.core.plan", "if TYPE_CHECKING:\n import torch", ["rota.core.plan imports torch in a function"]),
        ("rota.models.new", "from rota.runtime import Pipeline", ["rota.models.new imports rota.runtime"]),
        ("rota.drawing.new", "def f():\n from rota.drawing.artists import x\n import matplotlib.pyplot", []),
        ("rota.cli.new", "from rota.demo.walkthrough import x", ["rota.cli.new imports rota.demo.walkthrough"]),
        ("rota", "from rota.core.plan import Plan", ["rota imports rota.core.plan"]),
        ("rota.attic", "", ["rota.attic has no row in TABLE"]),
    ],
)
def test_the_complaints(module: str, source: str, told: list[str]) -> None:
    assert complaints(module, source) == told


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_inside_a_room_imports_in_a_circle(room: str) -> None:
    """Neither its modules nor its sub-rooms, each taken as a whole."""
    by_module = {
        module: {name for name in imports_of(path) if name in MODULES and name != module}
        for module, path in MODULES.items()
        if module.startswith(f"rota.{room}")
    }
    for graph in (by_module, contracted(room)):
        assert circle(graph) == []


def circle(graph: dict[str, set[str]]) -> list[str]:
    """One circle of a graph of imports; empty if it has none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_a_circle_is_found() -> None:
    assert sorted(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})[1:]) == ["a", "b", "c"]


def test_no_chain_of_imports_is_long() -> None:
    assert max(len(longest_chain(module)) for module in MODULES) <= MOST_FILES


def test_contributing_shows_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run PYTHONPATH=tests python -m support.layers"


@pytest.mark.parametrize(
    "use",
    [
        "dir(rota)",
        "rota.schedules.NAMED; rota.explain, rota.compare, rota.calibrate, rota.place, rota.Timeline, rota.DeviceOrder",
        "rota.check(rota.schedules.gpipe(rota.place(rota.Costs.uniform(2), rota.Cluster.uniform(2)), 2))",
    ],
    ids=["import rota", "core names", "a checked plan"],
)
def test_rota_and_its_core_load_nothing_heavy(use: str) -> None:
    code = f"import sys, rota; CORE = {CORE}; {use}; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200)
    assert done.stdout.strip() == ""
