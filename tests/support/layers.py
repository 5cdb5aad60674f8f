"""Who may import whom: the table that tests/test_layers.py checks and CONTRIBUTING.md shows.

PYTHONPATH=tests python -m support.layers      writes it into CONTRIBUTING.md, prints the longest chain of imports
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import rota
from support import ROOT

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


#: What plans without torch, lowest first: each may import those before it.
CORE = tuple(f"rota.{name}" for name in ("core", "shapes", "schedules", "calibration", "accounting", "cutting"))
#: Of third parties: what reads files.
EVERYWHERE = ("msgspec",)
#: Layouts of other trainers: text alone, read and written where torch is not installed.
TRAINERS = ("rota.interop.deepspeed", "rota.interop.megatron", "rota.interop.torchtitan")
#: What uses torch may use what torch does not promise.
TORCH = ("torch", "rota.torch_internals")
#: A module belongs to the longest name here that it begins with.
TABLE = {
    "rota": Row(("lazy_loader",)),
    "rota.__main__": Row(("rota.cli",)),
    **{name: Row(CORE[:i]) for i, name in enumerate(CORE)},
    "rota.compiled": Row(("numba", "numpy")),
    "rota.search": Row((*CORE, "rota.compiled", "numpy", "ortools")),
    "rota.batching": Row((*CORE, "rota.compiled", "numpy")),
    "rota.plan_server": Row(CORE, lazy=("rota.batching",)),
    "rota.torch_internals": Row(("torch",)),
    "rota.models": Row((*CORE, *TORCH), lazy=("transformers",)),
    "rota.runtime": Row((*CORE, "rota.models", "lazy_loader", *TORCH), lazy=("safetensors", "transformers")),
    "rota.verifying": Row((*CORE, "rota.models", "rota.runtime", *TORCH)),
    "rota.profiling": Row((*CORE, "rota.models", "rota.runtime", *TORCH)),
    "rota.interop": Row(
        (*CORE, "rota.models", "rota.runtime", "lazy_loader", *TORCH), lazy=(*TRAINERS, "rota.interop.planned_config")
    ),
    "rota.interop.layer_boundaries": Row(CORE),
    **{name: Row((*CORE, "rota.interop.layer_boundaries")) for name in TRAINERS},
    "rota.interop.planned_config": Row((*CORE, "rota.interop", "rota.interop.torchtitan", "torch")),
    "rota.planning": Row(
        (*CORE, "rota.models", "rota.runtime", "rota.profiling", "rota.verifying", *TORCH),
        lazy=("rota.search", "transformers"),
    ),
    "rota.diagnosis": Row((*CORE, "rota.models", "rota.runtime", "torch")),
    "rota.drawing": Row(CORE, lazy=("rota.drawing.artists", "matplotlib", "numpy")),
    "rota.drawing.artists": Row((*CORE, "rota.drawing", "matplotlib", "numpy")),
    "rota.compat": Row(),
    "rota.compat.deepspeed": Row((*CORE, "lazy_loader", "rota.models", "rota.runtime", "rota.profiling", *TORCH)),
    "rota.compat.rene": Row((*CORE, "rota.drawing"), lazy=("matplotlib", "lowtime", "networkx")),
    "rota.compat.tessel": Row((*CORE, "rota.search")),
    "rota.compat.torchdistpackage": Row((*CORE, "rota.models", "rota.runtime", *TORCH)),
    "rota.compat.varuna": Row((*CORE, "lazy_loader", "rota.models", "rota.runtime", "rota.profiling", *TORCH)),
    "rota.demo": Row((*CORE, "rota", "rota.profiling", "rota.runtime", *TORCH)),
    "rota.demo.train": Row(("rota", "torch", "model")),  # a script beside the user's model.py
    "rota.cli": Row(
        (*CORE, "click"),
        lazy=(
            *("rota", "rota.search", "rota.models", "rota.runtime", "rota.profiling", "rota.planning"),
            *("rota.verifying", "rota.diagnosis", "rota.drawing", "rota.demo", "rota.interop", *TRAINERS),
        ),
    ),
}


def home(module: str) -> str | None:
    """The entry of `TABLE` that a module of ours belongs to; `rota` itself is no room."""
    parts = module.split(".")
    return next((name for i in range(len(parts), 1, -1) if (name := ".".join(parts[:i])) in TABLE), None)


@cache
def imports_of(path: Path) -> tuple[tuple[str, bool], ...]:
    """All modules that a file imports, and whether only a function or a type checker does."""
    return tuple(imports(ast.parse(path.read_text(encoding="utf-8"))))


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
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def complaints(module: str) -> list[str]:
    """What a module imports against the table."""
    mine = home(module) or module
    if mine not in TABLE:
        return [f"{module} has no row in TABLE"]
    row, found = TABLE[mine], []
    for name, lazy in imports_of(MODULES[module]):
        top = name.split(".")[0]
        target = (home(name) or name) if top == "rota" else top
        allowed = target == mine or target in row.top or (lazy and target in row.lazy)
        if top not in (*sys.stdlib_module_names, *EVERYWHERE) and not allowed:
            found.append(f"{module} imports {name}" + (" in a function" if lazy else ""))
    return found


# --- rooms for people -------------------------------------------------------------------------------------------------

#: Rooms that have sub-rooms of their own, which must not import each other in a circle.
ROOMS = (
    *("core", "schedules", "calibration", "accounting", "cutting"),
    *("search", "batching", "models", "runtime", "profiling", "interop"),
    *("planning", "diagnosis", "drawing", "compat", "demo", "cli"),
)
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- rooms: python -m support.layers -->", "<!-- end of rooms -->"


def purpose(module: str) -> str:
    """The first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(MODULES[module].read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


def contracted(room: str) -> dict[str, set[str]]:
    """What each module and sub-room of a room imports of the others, in functions too."""

    def part(module: str) -> str:
        parts = module.split(".")
        is_in_sub_room = len(parts) > 3 or (len(parts) == 3 and MODULES[module].name == "__init__.py")
        return ".".join(parts[:3]) if is_in_sub_room else module

    found: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        if module.startswith(f"rota.{room}."):
            targets = {name for name, _ in imports_of(path) if name.startswith(f"rota.{room}.")}
            found.setdefault(part(module), set()).update(part(name) for name in targets if name in MODULES)
    return {name: targets - {name} for name, targets in found.items()}


@cache
def longest_chain(module: str) -> tuple[str, ...]:
    """The longest chain of files that loading `module` loads, each because the one before it imports it."""
    targets = {name for name, lazy in imports_of(MODULES[module]) if name in MODULES and name != module and not lazy}
    return (module, *max(map(longest_chain, targets), key=len, default=()))


def table() -> str:
    """The rooms from the bottom up, as a Markdown table."""
    lines = ["| room | what it is for | may import |", "|---|---|---|"]
    for room in ROOMS:
        name = f"rota.{room}"
        row = TABLE.get(name, Row())
        core = "the core" if name not in CORE else "those before it" if name != "rota.core" else "no other room"
        others = [f"`{other.removeprefix('rota.')}`" for other in row.top if other not in CORE]
        lazy = [f"`{other.removeprefix('rota.')}`" for other in row.lazy if other not in (*CORE, *TRAINERS)]
        told = ", ".join([core, *others]) + (f"; inside functions {', '.join(lazy)}" if lazy else "")
        lines.append(f"| `{room}` | {purpose(name)} | {told} |")
        for sub_room in sorted(of for of in MODULES if of.startswith(f"{name}.") and of.count(".") == 2):
            if MODULES[sub_room].name == "__init__.py":
                lines.append(f"| `{sub_room.removeprefix('rota.')}` | {purpose(sub_room)} | |")
    return "\n".join(lines)


def page() -> str:
    """CONTRIBUTING.md with the table as it is now."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page())
    longest = max(map(longest_chain, MODULES), key=len)
    print(f"the longest chain of imports has {len(longest)} files:", *longest, sep="\n  ")
