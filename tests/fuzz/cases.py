"""Cases: the k-th mutant of a target is the same on every machine, and can be made again from its seed and number.

A target is a type of file, or the folder of a checkpoint.
"""

import gzip
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from fuzz import checkpoints, seeds, verdicts
from fuzz.mutating import byte_mutant, csv_mutant, json_mutant, piece_mutant, text_mutant
from rota import Cluster, LayerCosts, Plan, Profile, RotaError, Timeline
from rota.cli import files
from rota.compat.tessel.schedule.schedplan import SchedPlan
from rota.core import reading
from rota.interop import ImportedTrace, deepspeed, import_traces, megatron, torchtitan


@dataclass(frozen=True, slots=True)
class Target:
    """A type of file: what mutants are made from, its name, what reads and uses it, and how many `make fuzz` makes."""

    texts: Callable[[], Sequence[str]]
    name: str
    read: Callable[[Path, Random], Any]
    use: Callable[[Any, Random], str]
    num_cases: int


def _read_traces(path: Path, chooser: Random) -> ImportedTrace:
    """`path` is of the first rank of a run; the other ranks' traces are as they were."""
    paths = [path]
    for rank, text in enumerate(chooser.choice(seeds.trace_texts())[1:], 1):
        paths.append(path.with_name(f"trace{rank}.json"))
        paths[-1].write_text(text)
    return import_traces(list(map(str, paths)))


def _plan(path: Path, chooser: Random) -> Plan | Timeline:
    return files.read_plan_or_timeline(str(path))


def _read_export(path: Path, chooser: Random) -> torchtitan.Imported:
    """`path` is one of an export's files; the others are as they were."""
    for name, text in chooser.choice(seeds.exports()).items():
        if name != path.name:
            path.with_name(name).write_text(text)
    return torchtitan.load(path if path.suffix != ".csv" else path.with_name("parallelism.json"))


def _export(name: str, num_cases: int) -> Target:
    return Target(partial(seeds.export_texts, name), name, _read_export, verdicts.of_export, num_cases)


def _text_of(from_json: Callable[[str], Any]) -> Callable[[Path, Random], Any]:
    return lambda path, _: from_json(reading.read_text(path))


TARGETS = {
    "plans": Target(seeds.plan_texts, "plan.json", _plan, verdicts.of_plan, 60_000),
    "csv": Target(seeds.csv_texts, "plan.csv", _plan, verdicts.of_plan, 40_000),
    "timelines": Target(seeds.timeline_texts, "timeline.json", _plan, verdicts.of_plan, 7_000),
    "costs": Target(
        seeds.costs_texts, "costs.json", lambda path, _: files.read_costs(str(path)), verdicts.of_costs, 5_000
    ),
    "traces": Target(
        lambda: [first for first, *_ in seeds.trace_texts()], "trace0.json", _read_traces, verdicts.of_traces, 4_000
    ),
    "schedules": Target(
        seeds.schedule_texts, "schedule.json", lambda path, _: SchedPlan.load(path), verdicts.of_schedule, 2_000
    ),
    "profiles": Target(seeds.profile_texts, "profile.json", _text_of(Profile.from_json), verdicts.of_profile, 2_500),
    "layers": Target(seeds.layers_texts, "layers.json", _text_of(LayerCosts.from_json), verdicts.of_layers, 1_500),
    "clusters": Target(seeds.cluster_texts, "cluster.json", _text_of(Cluster.from_json), verdicts.of_cluster, 1_500),
    "torchtitan-json": _export("parallelism.json", 1_000),
    "torchtitan-csv": _export("schedule.csv", 1_000),
    "layouts": Target(
        seeds.layout_texts,
        "layout.txt",
        _text_of(lambda text: megatron.read_layout(text, 2)),
        verdicts.of_layout,
        1_000,
    ),
    "boundaries": Target(
        seeds.boundaries_texts, "boundaries.json", _text_of(deepspeed.read_boundaries), verdicts.of_boundaries, 500
    ),
}


#: How many folders of a checkpoint `make fuzz` makes.
NUM_FOLDERS = 130_000
CHECKPOINTS = "checkpoints"
NAMES = (*TARGETS, CHECKPOINTS)


def num_cases(target: str) -> int:
    """How many of a target `make fuzz` makes."""
    return NUM_FOLDERS if target == CHECKPOINTS else TARGETS[target].num_cases


def mutant(target: str, seed: int, number: int) -> bytes:
    """The file of a case."""
    chooser = Random(f"{target} {seed} {number}")
    texts = TARGETS[target].texts()
    text, form = chooser.choice(texts), chooser.random()
    others = [text for of in TARGETS.values() for text in of.texts()] if chooser.random() < 0.02 else texts
    if form < 0.08:
        mutated = text_mutant(text, chooser, others)
    elif TARGETS[target].name.endswith(".txt"):
        mutated = piece_mutant(text, chooser)
    elif TARGETS[target].name.endswith(".csv"):
        mutated = csv_mutant(text, chooser, others)
    else:
        mutated = json_mutant(text, chooser, [other for other in others if other.startswith("{")])
    data = mutated.encode(errors="surrogatepass")
    if target == "traces" and chooser.random() < 0.3:
        data = gzip.compress(data, 1, mtime=0)
    if chooser.random() < 0.05:
        data = byte_mutant(data, chooser)
    return data


def run(target: str, seed: int, number: int, folder: Path) -> str:
    """How a case ends: "accepted…", or how it is refused. Anything else is raised."""
    chooser = Random(f"{target} {seed} {number}")  # which chooses the same text as `mutant` first
    try:
        if target == CHECKPOINTS:
            return checkpoints.use(checkpoints.mutant(chooser), chooser)
        path = folder / TARGETS[target].name
        path.write_bytes(mutant(target, seed, number))
        try:
            made = TARGETS[target].read(path, chooser)
        except RotaError as error:
            return verdicts.refused(error)
        return TARGETS[target].use(made, chooser)
    except BaseException as error:
        error.add_note(f"case {number} of {target}, seed {seed}: fuzz.cases.run({target!r}, {seed}, {number}, folder)")
        raise
