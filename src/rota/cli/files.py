"""Plans, timelines and costs from and to files; errors name the file."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from argparse import Namespace
from pathlib import Path

from rota import schedule_csv
from rota.cli.interrupts import told_at_once
from rota.costs import Cluster, Costs
from rota.errors import FormatError, RotaError
from rota.placement import Placement
from rota.placing import place
from rota.plan import Plan
from rota.simulation import timeline_of
from rota.tasks import Kind
from rota.timeline import Timeline


class InputError(RotaError):
    """A file or value on the command line that cannot be used."""


def require(module: str, extra: str) -> None:
    """Load what an extra brings. Raises InputError, with the remedy, if it is not installed."""
    if importlib.util.find_spec(module) is None:
        raise InputError(f"this needs {module}; install it by: pip install 'rota[{extra}]'")
    with told_at_once():
        importlib.import_module(module)


def require_folder(path: str) -> None:
    """Raises InputError if a file could not be written there."""
    if not os.access(Path(path).parent, os.W_OK) or Path(path).is_dir():
        raise InputError(f"cannot write {path}: there is no such folder that can be written to; check the path")


def make_folder(path: str) -> None:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {path}: {error.strerror}; give another by -o") from None


def read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise InputError(f"cannot read {path}: it is no text file") from None


def write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; check the folder") from None


def read_costs(path: str) -> Costs:
    try:
        return Costs.from_json(read(path))
    except InputError:
        raise
    except RotaError as error:
        raise InputError(f"{path}: {error}") from None


def read_plan(path: str) -> Plan:
    """A plan.json, the plan inside a timeline.json, or a schedule CSV (then with unit costs)."""
    loaded = read_plan_or_timeline(path)
    return loaded.plan if isinstance(loaded, Timeline) else loaded


def read_timeline(path: str) -> Timeline:
    """A timeline.json; a plan is simulated."""
    return timeline_of(read_plan_or_timeline(path))


def read_plan_or_timeline(path: str) -> Plan | Timeline:
    text = read(path)
    try:
        if path.endswith(".csv"):
            return Plan.from_csv(text, _placement_of_csv(text))
        if _kind_of(text) == "timeline":
            return Timeline.from_json(text)
        return Plan.from_json(text)
    except FormatError as error:
        raise InputError(f"{path}: {error}") from None


def _kind_of(text: str) -> object:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None  # the reader of plans says what is wrong
    return document.get("rota") if isinstance(document, dict) else None


def _placement_of_csv(text: str) -> Placement:
    """A chain of stages where the CSV puts them: F 1 µs, B 2 µs or I and W 1 µs each, no limit."""
    orders = schedule_csv.read(text)
    if not orders:
        raise FormatError("the CSV is empty; it needs one line a rank, such as 0F0,0F1,0B0,0B1")
    ranks = schedule_csv.stage_ranks(orders)
    kinds = {op.kind for order in orders for op in order}
    split = Kind.W in kinds
    costs = Costs.uniform(len(ranks), 1, 1 if split else 2, 1 if split else None)
    placement = place(costs, Cluster.uniform(len(orders)), ranks)
    return placement if kinds - {Kind.F} else placement.forward_only()


def refuse_overwriting(arguments: Namespace) -> None:
    """Raises InputError where a command is told to write to a file that it reads."""
    given = dict(vars(arguments))
    output = given.pop("timeline" if arguments.command == "run" else "output", None)
    read = [path for value in given.values() for path in (value if isinstance(value, list) else [value])]
    if output is not None and any(isinstance(path, str) and _same_file(path, output) for path in read):
        raise InputError(f"{output} is what the command reads, and would be lost; write to another file")


def _same_file(a: str, b: str) -> bool:
    return os.path.exists(a) and os.path.exists(b) and os.path.samefile(a, b)
