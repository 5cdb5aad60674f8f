"""The files of a command: plans, timelines and costs that it reads, and where it may write."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

from rota.cli.requirements import InputError
from rota.cli.screen import note
from rota.core import reading, schedule_csv, writing
from rota.core.cluster import Cluster, ClusterFile
from rota.core.costs import Costs, assumed_costs
from rota.core.errors import FormatError, NothingFitsError, PlanError, RotaError
from rota.core.placement import Placement
from rota.core.placing import place
from rota.core.plan import Plan
from rota.core.simulation import timeline_of
from rota.core.tasks import Kind
from rota.core.timeline import Timeline

T = TypeVar("T")

#: What a schedule CSV gets from `assumed_costs`.
_ASSUMED_TIMES = "Rota assumes 1 ms for F, 2 ms for B, and 1 ms each for I and W"
_PICTURES = (".html", ".png", ".svg", ".pdf")

#: The kind of an output decides which names are refused, and whether a folder is made.
Written = Literal["file", "plan", "timeline", "folder", "files in a folder"]
#: Or how it follows from the options.
WrittenBy = Written | Callable[[Any], Written]

# --- reading: errors name the file ------------------------------------------------------------------------------------


def read(path: str, parse: Callable[[str], T]) -> T:
    """What `parse` makes of the text of a file that Rota wrote."""
    text = text_of(path)
    with named(path):
        return parse(text)


def read_costs(path: str) -> Costs:
    """The costs in a JSON file."""
    return read(path, Costs.from_json)


def read_cluster(path: str) -> Cluster:
    """The cluster in a JSON file, or that of a plan or timeline."""
    return read(path, _cluster_in)


def read_plan(path: str) -> Plan:
    """A plan.json, the plan inside a timeline.json, or a schedule CSV, with assumed costs."""
    loaded = read_plan_or_timeline(path)
    return loaded.plan if isinstance(loaded, Timeline) else loaded


def read_timeline(path: str, costs: str | None = None) -> Timeline:
    """A timeline.json; a plan is simulated. `costs`: a file, for a schedule CSV."""
    loaded = read_plan_or_timeline(path, costs)
    with named(path):
        return timeline_of(loaded)


def read_plan_or_timeline(path: str, costs: str | None = None) -> Plan | Timeline:
    """The plan in a plan.json or schedule CSV, or the timeline in a timeline.json. `costs`: a file, for a CSV."""
    text = text_of(path)
    stage_costs = None if costs is None else read_costs(costs)
    if costs is not None and not is_csv(path):
        raise InputError(f"--costs {costs}: {path} has costs of its own; leave --costs out")
    with named(path):
        if is_csv(path):
            return Plan.from_csv(text, _placement_of_csv(text, stage_costs))
        document = reading.parse(text, "plan", "timeline")
        return Timeline.from_fields(document) if document.path == "timeline" else Plan.from_fields(document)


def note_one_step(command: str, path: str) -> None:
    """Say on standard error that a measured timeline has a single step, and of a run which one."""
    note(command, f"{path} has one step (the last one, if `rota run` wrote it); other steps may differ")


def note_assumed_times(command: str, *paths: str) -> bool:
    """Say on standard error which files have no times, so that times are assumed. Returns whether there is one."""
    without = [path for path in paths if is_csv(path)]
    for path in without:
        note(
            command,
            f"{path} has no times; {_ASSUMED_TIMES}; to use your own times, run `rota show {path} --costs costs.json "
            f"--timeline timeline.json`",
        )
    return bool(without)


def is_csv(path: str) -> bool:
    """Whether a file holds a schedule CSV, by its name."""
    return path.lower().endswith(".csv")


def text_of(path: str) -> str:
    """The text of a file that Rota wrote. Raises InputError for a Python file: a JSON error would help less."""
    text = reading.read_text(path)
    if path.lower().endswith(".py"):
        raise InputError(
            f"expected a Rota file, but {path} is a Python file; run a script with "
            f"`rota run plan.json {path}`, or make a plan for a model with `rota autoplan {path}`"
        )
    return text


@contextmanager
def named(path: str) -> Iterator[None]:
    """Errors raised inside name the file."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{path}: {error}", error.reason) from None
    except NothingFitsError as error:
        raise NothingFitsError(f"{path}: {error}") from None
    except RotaError as error:
        raise InputError(f"{path}: {error}") from None


def _cluster_in(text: str) -> Cluster:
    document = reading.parse(text, "cluster", "plan", "timeline")
    if document.path == "cluster":
        return Cluster.from_file(document.read(ClusterFile))
    plan = Plan.from_fields(document) if document.path == "plan" else Timeline.from_fields(document).plan
    return plan.placement.cluster


def _placement_of_csv(text: str, costs: Costs | None) -> Placement:
    """A chain of stages where the CSV puts them, without a memory limit, with these costs or `_ASSUMED_TIMES`."""
    orders = schedule_csv.read(text)
    if not orders:
        raise FormatError("the CSV is empty; it needs one line per rank, such as 0F0,0F1,0B0,0B1")
    ranks = schedule_csv.stage_ranks(orders)
    kinds = {op.kind for order in orders for op in order}
    if costs is not None and costs.num_stages != len(ranks):
        raise FormatError(
            f"the CSV has {len(ranks)} stages, but --costs has costs for {costs.num_stages}; give the costs of "
            f"every stage"
        )
    costs = assumed_costs(len(ranks)) if costs is None else costs
    costs = costs.with_split_backward() if Kind.W in kinds else costs
    placement = place(costs, Cluster.uniform(len(orders)), ranks)
    return placement if kinds - {Kind.F} else placement.forward_only()


# --- writing ----------------------------------------------------------------------------------------------------------


def refuse_outputs(command: str, outputs: Mapping[str, WrittenBy], options: SimpleNamespace) -> None:
    """Raise InputError, before any work, if a command cannot write its outputs, or not in the format of their names.

    `outputs` says what is written by the option that names it. A command must not overwrite a file that it reads, and
    may overwrite others only with --force.
    """
    inputs = [value for name, value in vars(options).items() if name not in outputs]
    paths = [path for value in inputs for path in (value if isinstance(value, (tuple, list)) else [value])]
    read = [path for path in paths if isinstance(path, str) and os.path.exists(path)]
    places: set[str] = set()
    for name, writes in outputs.items():
        output = getattr(options, name)
        if output is None:
            continue
        if (place := os.path.realpath(output)) in places:
            raise InputError(f"{output} is given for two outputs; the second would overwrite the first")
        places.add(place)
        kind = writes(options) if callable(writes) else writes
        _refuse_suffix(output, kind)
        if os.path.exists(output) and any(os.path.samefile(path, output) for path in read):
            raise InputError(f"{output} is read by the command, and would be overwritten; write to another file")
        option = "--force (before the plan)" if command == "run" else "--force"
        refuse_taken(Path(output), options.force, is_folder=kind == "folder", option=option)
        (_refuse_file if kind in ("file", "plan", "timeline") else _refuse_folder)(output)


def refuse_taken(path: Path, force: bool, is_folder: bool = False, option: str = "--force") -> None:
    """Raise InputError if the path has content to lose, unless `force`."""
    try:
        is_taken = any(path.iterdir()) if is_folder and path.is_dir() else path.is_file()  # /dev/stdout is none
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; check the path") from None
    if is_taken and not force:
        raise InputError(f"{path} already exists; give another name, or {option} to overwrite it")


def _refuse_file(path: str) -> None:
    folder = Path(os.path.realpath(path)).parent
    if os.path.exists(path) and not os.path.isfile(path):  # /dev/stdout is written to as it is
        can_write = not os.path.isdir(path) and os.access(path, os.W_OK)
    else:
        can_write = folder.is_dir() and os.access(folder, os.W_OK)
    if not can_write:
        raise InputError(
            f"cannot write {path}: it is a folder, or its folder does not exist or is not writable; check the path"
        )


def _refuse_folder(path: str) -> None:
    place = Path(path).absolute()
    parent = next(folder for folder in (place, *place.parents) if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InputError(f"cannot make the folder {path}: {parent} is not a writable folder; give another with -o")


def _refuse_suffix(output: str, kind: Written) -> None:
    """Raise InputError if a plan or a timeline would be written as a picture."""
    suffix = Path(output).suffix.lower()
    if kind == "plan" and suffix in _PICTURES:
        raise InputError(
            f"a plan is written as .json, or as .csv in PyTorch's format, not as {output}; `rota show` draws pictures"
        )
    if kind == "timeline" and suffix in (*_PICTURES, ".csv"):
        raise InputError(f"a timeline is written as .json, not as {output}; `rota show` draws pictures")


def make_folder(path: str) -> None:
    """Make a folder unless it exists. Raises InputError."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {path}: {error.strerror}; give another with -o") from None


def write(path: str, text: str, then: str = "", *, quietly: bool = False) -> None:
    """Write a text file atomically, and say so unless `quietly`; `then` ends the sentence. Raises InputError."""
    try:
        writing.write_text(path, text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; check the folder") from None
    if not quietly:
        print(f"Wrote {path}{then}.")


def keep(path: str | None, text: str, example: str = "", then: str = "", *, quietly: bool = False) -> None:
    """Write what a command has made, or say that it is lost, and how to keep it: with -o `example`."""
    if path is not None:
        write(path, text, then, quietly=quietly)
    elif not quietly:
        print(f"The result was not saved; use {f'-o {example}'.strip()} to save it.")
