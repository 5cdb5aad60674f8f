"""Arrows go one way: who may import what, and that `import rota` stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import rota

PACKAGE = Path(rota.__file__).parent
MODULES = {
    ".".join(["rota", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
HEAVY = ("torch", "numpy", "numba", "ortools", "matplotlib", "safetensors")


@dataclass(frozen=True)
class Row:
    """What a module or room may import besides itself and the standard library: at its top, and in functions alone."""

    top: tuple[str, ...] = ()
    lazy: tuple[str, ...] = ()


#: Nouns and verbs, lowest first: each may import those before it, and nothing from third parties.
CORE = tuple(
    f"rota.{name}"
    for name in (
        *(
            "errors",
            "units",
            "notebook",
            "reading",
            "stopping",
            "writing",
            "costs",
            "tasks",
            "taskgraph",
            "placement",
            "placing",
            "shapes",
            "layers",
            "profiles",
            "schedule_csv",
            "usage",
            "plan",
            "memory",
            "timeline",
        ),
        *("simulation", "checking", "schedules", "calibration", "accounting", "comparison", "cutting", "replanning"),
    )
)
#: Layouts of other trainers: text alone, read and written where torch is not installed.
TRAINERS = ("rota.interop.deepspeed", "rota.interop.megatron", "rota.interop.torchtitan")
#: A module belongs to the longest name here that it begins with.
TABLE = {
    "rota": Row(),
    "rota.__main__": Row(("rota.cli",)),
    **{name: Row(CORE[:i]) for i, name in enumerate(CORE)},
    "rota.search": Row((*CORE, "numpy", "numba", "ortools")),
    "rota.models": Row((*CORE, "torch")),
    "rota.runtime": Row((*CORE, "rota.models", "torch"), lazy=("safetensors",)),
    "rota.profiling": Row((*CORE, "rota.models", "rota.runtime", "torch")),
    "rota.interop": Row((*CORE, "rota.models", "rota.runtime", "torch"), lazy=TRAINERS),
    "rota.interop.cuts": Row(CORE),
    **{name: Row((*CORE, "rota.interop.cuts")) for name in TRAINERS},
    "rota.planning": Row((*CORE, "rota.models", "rota.runtime", "rota.profiling", "torch"), lazy=("rota.search",)),
    "rota.drawing": Row(CORE, lazy=("rota.drawing.artists", "matplotlib", "numpy")),
    "rota.drawing.artists": Row((*CORE, "rota.drawing", "matplotlib", "numpy")),
    "rota.compat": Row(),
    "rota.compat.deepspeed": Row((*CORE, "rota.models", "rota.runtime", "rota.profiling", "torch")),
    "rota.compat.rene": Row((*CORE, "rota.drawing"), lazy=("matplotlib", "lowtime", "networkx")),
    "rota.compat.tessel": Row((*CORE, "rota.search")),
    "rota.compat.torchdistpackage": Row((*CORE, "rota.models", "rota.runtime", "torch")),
    "rota.compat.varuna": Row((*CORE, "rota.models", "rota.runtime", "rota.profiling", "torch")),
    "rota.demo": Row((*CORE, "rota", "rota.models", "rota.runtime", "rota.profiling", "rota.drawing", "torch")),
    "rota.cli": Row(
        CORE,
        lazy=(
            *(
                "rota",
                "rota.search",
                "rota.models",
                "rota.runtime",
                "rota.profiling",
                "rota.planning",
                "rota.drawing",
                "rota.demo",
                "rota.interop",
                "rota.interop.cuts",
                *TRAINERS,
            ),
        ),
    ),
}


def home(module: str) -> str | None:
    """The entry of `TABLE` that a module of ours belongs to; `rota` itself is no room."""
    parts = module.split(".")
    return next((name for i in range(len(parts), 1, -1) if (name := ".".join(parts[:i])) in TABLE), None)


def imports(tree: ast.AST, lazy: bool = False) -> Iterator[tuple[str, bool]]:
    """(module, whether only a function or a type checker imports it)."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            submodules = (f"{origin}.{alias.name}" for alias in node.names)
            yield from ((name if name in MODULES else origin, lazy) for name in submodules)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or is_for_types(node):
            yield from imports(node, lazy=True)
        else:
            yield from imports(node, lazy)


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def complaints(module: str, source: str) -> list[str]:
    """What `source` imports against the table."""
    tree = ast.parse(source)
    mine = home(module) or module
    if mine not in TABLE:
        return [f"{module} has no row in TABLE"]
    if module == "rota":  # it repeats its lazy names for type checkers
        tree.body = [node for node in tree.body if not is_for_types(node)]
    row, found = TABLE[mine], []
    for name, lazy in imports(tree):
        top = name.split(".")[0]
        target = (home(name) or name) if top == "rota" else top
        allowed = target == mine or target in row.top or (lazy and target in row.lazy)
        if top not in sys.stdlib_module_names and not allowed:
            found.append(f"{module} imports {name}" + (" in a function" if lazy else ""))
    return found


@pytest.mark.parametrize("module", MODULES)
def test_every_module_imports_only_what_its_row_allows(module: str) -> None:
    assert complaints(module, MODULES[module].read_text()) == []


@pytest.mark.parametrize(
    ("module", "source", "told"),
    [
        (
            "rota.plan",
            "import json, collections.abc\nfrom rota.placement import Placement\nfrom rota import reading",
            [],
        ),
        ("rota.plan", "import torch.nn", ["rota.plan imports torch.nn"]),
        ("rota.plan", "from rota.timeline import Timeline", ["rota.plan imports rota.timeline"]),
        ("rota.plan", "from rota import Task", ["rota.plan imports rota"]),
        ("rota.plan", "from . import tasks", ["rota.plan imports ."]),
        ("rota.plan", "class A:\n def f(self):\n  import numpy", ["rota.plan imports numpy in a function"]),
        ("rota.plan", "if TYPE_CHECKING:\n import torch", ["rota.plan imports torch in a function"]),
        ("rota.schedules.gpipe", "from rota.schedules.common import depth", []),
        ("rota.models.new", "import torch\nfrom rota.models import Stages", []),
        ("rota.models.new", "from rota.runtime import Pipeline", ["rota.models.new imports rota.runtime"]),
        ("rota.drawing.new", "def f():\n from rota.drawing.artists import x\n import matplotlib.pyplot", []),
        (
            "rota.drawing.new",
            "from rota.drawing.artists import x",
            ["rota.drawing.new imports rota.drawing.artists"],
        ),
        ("rota.cli.new", "def f():\n from rota.demo.main import x", []),
        ("rota.cli.new", "from rota.demo.main import x", ["rota.cli.new imports rota.demo.main"]),
        ("rota", "if TYPE_CHECKING:\n from rota.models import split", []),
        ("rota", "from rota.plan import Plan", ["rota imports rota.plan"]),
        ("rota.attic", "", ["rota.attic has no row in TABLE"]),
    ],
)
def test_the_complaints(module: str, source: str, told: list[str]) -> None:
    assert complaints(module, source) == told


def test_lazy_names_and_names_for_type_checkers_are_the_same() -> None:
    (block,) = (node for node in ast.parse(MODULES["rota"].read_text()).body if is_for_types(node))
    for_types = {
        alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert for_types == {**rota._HOME_OF, **dict.fromkeys(rota._ROOMS, "rota")}


@pytest.mark.parametrize(
    "use",
    [
        "dir(rota)",
        "[getattr(rota, name) for name, home in rota._HOME_OF.items() if home in CORE]; rota.schedules.NAMED",
        "rota.check(rota.schedules.gpipe(rota.place(rota.Costs.uniform(2), rota.Cluster.uniform(2)), 2))",
    ],
    ids=["import rota", "core names", "a checked plan"],
)
def test_rota_and_its_core_load_nothing_heavy(use: str) -> None:
    code = f"import sys, rota; CORE = {CORE}; {use}; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""
