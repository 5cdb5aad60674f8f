"""A placement in JSON, as a part of the files of plans and timelines."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from rota.core import reading
from rota.core.cluster import Cluster, ClusterFile
from rota.core.errors import FormatError
from rota.core.placement import Placement, amounts_of
from rota.core.reading import Positive, Signed, Whole
from rota.core.tasks import Amount, Edge, Kind, PerClass, StepEnd, Task, amount_of

_AmountInFile: TypeAlias = Signed | Annotated[tuple[Signed, ...], Meta(min_length=1)]  # one number, or one per class
_TaskName: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9]{1,9}[FBIWROL]$")]  # a stage and a kind
_TaskRow: TypeAlias = tuple[_TaskName, tuple[Whole, ...], _AmountInFile, _AmountInFile, _AmountInFile]


class PlacementFile(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A placement in JSON.

    A row of `tasks` has a stage and a kind, such as "0F", its ranks, duration_us, held_bytes and peak_bytes; a row of
    `edges` two of these names and bytes; a row of `step_ends` a stage, reduce_us and optimizer_us.
    """

    tasks: tuple[_TaskRow, ...]
    edges: tuple[tuple[str, str, _AmountInFile], ...]
    cluster: ClusterFile
    static_bytes: tuple[Whole, ...]
    step_ends: tuple[tuple[Whole, Whole, Whole], ...]
    microbatch_rows: Positive | None = None
    class_of: tuple[Whole, ...] = ()
    sample_of: tuple[Whole, ...] = ()
    state_bytes: tuple[Whole, ...] = ()
    snapshot_bytes: tuple[Whole, ...] = ()


_SAME_IN_FILES = ("static_bytes", "microbatch_rows", "class_of", "sample_of", "state_bytes", "snapshot_bytes")


def placement_fields(placement: Placement) -> dict[str, Any]:
    """The fields of a `PlacementFile`."""
    names = [*map(str, placement.tasks)]
    return {
        "tasks": tuple((str(task), task.ranks, *map(_in_file, amounts_of(task))) for task in placement.tasks),
        "edges": tuple((names[a], names[b], _in_file(size)) for a, b, size in placement.edges),
        "cluster": placement.cluster.to_file(),
        "step_ends": tuple((end.stage, end.reduce_us, end.optimizer_us) for end in placement.step_ends),
        **{name: getattr(placement, name) for name in _SAME_IN_FILES},
    }


def read_placement(file: PlacementFile, path: str) -> Placement:
    """The placement of a file, at this path of a document. Raises FormatError or PlacementError."""
    tasks = tuple(
        Task(int(name[:-1]), Kind(name[-1:]), ranks, *map(_from_file, amounts)) for name, ranks, *amounts in file.tasks
    )
    index = {str(task): i for i, task in enumerate(tasks)}
    for i, (*ends, _) in enumerate(file.edges):
        if unknown := [end for end in ends if end not in index]:
            raise FormatError(
                f"{path}.edges[{i}] has {reading.short(unknown[0])}; expected the name of a task, such as "
                + next(iter(index), "0F")
            )
    edges = tuple(Edge(index[source], index[target], _from_file(size)) for source, target, size in file.edges)
    step_ends = tuple(StepEnd(*end) for end in file.step_ends)
    same = {name: getattr(file, name) for name in _SAME_IN_FILES}
    return Placement(tasks, edges, Cluster.from_file(file.cluster), step_ends=step_ends, **same)


def _in_file(amount: Amount) -> _AmountInFile:
    return amount.values if isinstance(amount, PerClass) else amount


def _from_file(field: _AmountInFile) -> Amount:
    return amount_of(field) if isinstance(field, tuple) else field
