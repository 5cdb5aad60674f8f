"""The state of a training besides tensors as JSON: options, schedules and random state. Every field is checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rota import reading
from rota.errors import PipelineError
from rota.reading import Field
from rota.runtime.checkpoints.manifest import pair
from rota.runtime.checkpoints.optimizer_state import OF_THE_RANK, Place, Record
from rota.runtime.checkpoints.random_states import random_from_json, random_to_json
from rota.runtime.checkpoints.values import from_json, to_json, unlike

_OF_GROUP = ("optimizer", "options", "scheduled")
_OF_WEIGHT = ("tensors", "values")


@dataclass(frozen=True, slots=True)
class TrainingState:
    """`records` by weight key; `scheduler`: {"scheduler": its class, "state": its state without values per group}."""

    records: dict[str, Record]
    scheduler: dict[str, Any] | None
    random: dict[str, Any]


def training_to_json(state: TrainingState) -> dict[str, Any]:
    """The state as JSON. Raises PipelineError if a value cannot be restored from JSON."""
    return {
        "random": random_to_json(state.random),
        "scheduler": scheduler_to_json(state.scheduler),
        "records": records_to_json(state.records),
    }


def training_from_json(field: Field) -> TrainingState:
    """The state that `training_to_json` wrote. Raises FormatError that names the field."""
    field.refuse_others(("random", "scheduler", "records"))
    records, drawn = records_from_json(field["records"]), random_from_json(field["random"])
    return TrainingState(records, scheduler_from_json(field["scheduler"]), drawn)


# --- optimizer and scheduler ------------------------------------------------------------------------------------------


def records_to_json(records: Mapping[str, Record]) -> list[Any]:
    """Records of `records_of` as JSON: for each group what its weights share, and what each has of its own, by its key.

    Raises PipelineError if a value cannot be restored from JSON.
    """
    known: dict[int, dict[str, Any]] = {}  # by an object that only the weights of one group of one rank share
    groups: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for key, record in sorted(records.items()):
        of_weights = known.get(id(record["options"]))
        if of_weights is None:
            of_group = _of_group_to_json(key, record)
            _, of_weights = groups.setdefault(json.dumps(of_group), (of_group, {}))
            known[id(record["options"])] = of_weights
        of_weights[key] = _of_weight_to_json(key, record)
    return [*groups.values()]


def records_from_json(field: Field) -> dict[str, Record]:
    """The records that `records_to_json` wrote. Raises FormatError that names the field."""
    found: dict[str, Record] = {}
    for of_group, of_weights in map(pair, field):
        shared = _of_group_from_json(of_group)
        for key, own in of_weights.items():
            if key.text() in found:
                raise key.wrong("a weight that occurs only once")
            found[key.text()] = {**shared, **_of_weight_from_json(own)}
    return found


def _of_group_to_json(key: str, record: Record) -> dict[str, Any]:
    name = record["optimizer"]
    return {
        "optimizer": name,
        "options": _named_to_json(record["options"], f"{name}'s group of {key}"),
        "scheduled": [
            [[*place], to_json(value, f"the scheduler's {place[-1]}")] for place, value in record["scheduled"].items()
        ],
    }


def _of_group_from_json(field: Field) -> dict[str, Any]:
    field.refuse_others(_OF_GROUP)
    options = _named_from_json(field["options"])
    for name in OF_THE_RANK:
        if name in options:
            raise field["options"].wrong(f"options without {name!r}, which differs between ranks")
    placed = [(_place(place), value) for place, value in map(pair, field["scheduled"])]
    unlike(field["scheduled"], [place for place, _ in placed])
    scheduled = {place: from_json(value) for place, value in placed}
    return {"optimizer": field["optimizer"].name(), "options": options, "scheduled": scheduled}


def _of_weight_to_json(key: str, record: Record) -> dict[str, Any]:
    path = f"{record['optimizer']}'s state of {key}"
    for state in record["tensors"]:
        _require_name(state, path)
    return {"tensors": record["tensors"], "values": _named_to_json(record["values"], path)}


def _of_weight_from_json(field: Field) -> dict[str, Any]:
    field.refuse_others(_OF_WEIGHT)
    tensors = [name.name() for name in field["tensors"]]
    values = _named_from_json(field["values"])
    if len({*tensors, *values}) < len(tensors) + len(values):
        raise field["tensors"].wrong("names that occur once")
    return {"tensors": tensors, "values": values}


def scheduler_to_json(scheduler: dict[str, Any] | None) -> Any:
    """A scheduler's common state as JSON. Raises PipelineError if a value cannot be restored from JSON."""
    if scheduler is None:
        return None
    name = scheduler["scheduler"]
    return {"scheduler": name, "state": to_json(scheduler["state"], f"{name}'s state")}


def scheduler_from_json(field: Field) -> dict[str, Any] | None:
    """The state that `scheduler_to_json` wrote. Raises FormatError that names the field."""
    if field.value is None:
        return None
    field.refuse_others(("scheduler", "state"))
    if type(state := from_json(field["state"])) is not dict:
        raise field["state"].wrong("a dict")
    return {"scheduler": field["scheduler"].name(), "state": state}


def _named_to_json(values: Mapping[Any, Any], path: str) -> list[Any]:
    for name in values:
        _require_name(name, path)
    return [[name, to_json(value, (path, name))] for name, value in values.items()]


def _require_name(name: object, path: str) -> None:
    """Raises PipelineError or FormatError if a key of `path` cannot be read again."""
    if type(name) is not str:
        raise PipelineError(f"{path} has the key {name!r}, a {type(name).__name__}; use a string")
    # Most are identifiers, and are seen so at once.
    if not (name.isascii() and name.isidentifier()) or len(name) > reading.LONGEST_NAME:
        Field(f"{path}, a name", name).name()


def _named_from_json(field: Field) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in map(pair, field):
        if name.name() in found:
            raise name.wrong("a name that occurs only once")
        found[name.name()] = from_json(value)
    return found


def _place(field: Field) -> Place:
    place = tuple(part.integer(0) if isinstance(part.value, int) else part.name() for part in field)
    if not place:
        raise field.wrong("names and numbers")
    return place
