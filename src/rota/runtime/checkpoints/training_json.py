"""`training.json`: the state besides tensors: options, schedules and random state. Every field is checked."""

from __future__ import annotations

import base64
import binascii
import json
import random
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rota import reading
from rota.errors import FormatError, PipelineError
from rota.reading import Field
from rota.runtime.checkpoints.files import TRAINING, Saved, naming
from rota.runtime.checkpoints.manifest import pair
from rota.runtime.checkpoints.optimizer_state import OF_THE_RANK, Place, Record
from rota.runtime.checkpoints.values import from_json, to_json

_RECORD = ("optimizer", "options", "tensors", "values", "scheduled")


@dataclass(frozen=True, slots=True)
class TrainingState:
    """`records` by weight key; `scheduler`: {"scheduler": its class, "state": its state without values per group}."""

    records: dict[str, Record]
    scheduler: dict[str, Any] | None
    random: dict[str, Any]


def training_to_json(state: TrainingState) -> str:
    """The text of `training.json`. Raises PipelineError if it is too long to be read again."""
    records = [[key, json.dumps(record_to_json(key, record))] for key, record in sorted(state.records.items())]
    text = "{" + f'\n"random": {json.dumps(_random_to_json(state.random))},\n"scheduler": '
    text += json.dumps(scheduler_to_json(state.scheduler)) + ',\n"records": [\n'
    text += ",\n".join(f"[{json.dumps(key)}, {record}]" for key, record in records) + "\n]\n}\n"
    if len(text) > reading.LARGEST_BYTES:
        raise PipelineError(
            f"the options and states of the optimizer, besides its tensors, have {len(text):,} bytes, but only "
            f"{reading.LARGEST_BYTES:,} can be read again; make large tensors entries of the optimizer's state"
        )
    return text


def read_training(saved: Saved) -> TrainingState:
    """Read `training.json`. Raises FormatError that names the field."""
    with naming(saved.path / TRAINING):
        document = Field("training", reading.load(saved.read_text(TRAINING)))
        document.refuse_others(("random", "scheduler", "records"))
        records: dict[str, Record] = {}
        for entry in document["records"]:
            key, record = pair(entry)
            if key.text() in records:
                raise key.wrong("a weight that occurs only once")
            records[key.text()] = record_from_json(record)
        return TrainingState(records, scheduler_from_json(document["scheduler"]), _random_from_json(document["random"]))


# --- optimizer and scheduler ------------------------------------------------------------------------------------------


def record_to_json(key: str, record: Record) -> dict[str, Any]:
    """A weight's record as JSON. Raises PipelineError if a value cannot be restored from JSON."""
    name = record["optimizer"]
    return {
        "optimizer": name,
        "options": _named_to_json(record["options"], f"{name}'s group of {key}"),
        "tensors": record["tensors"],
        "values": _named_to_json(record["values"], f"{name}'s state of {key}"),
        "scheduled": [
            [[*place], to_json(value, f"the scheduler's {place[-1]}")] for place, value in record["scheduled"].items()
        ],
    }


def record_from_json(field: Field) -> Record:
    """The record that `record_to_json` wrote. Raises FormatError that names the field."""
    field.refuse_others(_RECORD)
    options = _named_from_json(field["options"])
    for name in OF_THE_RANK:
        if name in options:
            raise field["options"].wrong(f"options without {name!r}, which differs between ranks")
    tensors = [name.name() for name in field["tensors"]]
    values = _named_from_json(field["values"])
    if len({*tensors, *values}) < len(tensors) + len(values):
        raise field["tensors"].wrong("names that occur once")
    scheduled = {_place(place): from_json(value) for place, value in map(pair, field["scheduled"])}
    return {
        "optimizer": field["optimizer"].name(),
        "options": options,
        "tensors": tensors,
        "values": values,
        "scheduled": scheduled,
    }


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
        if type(name) is not str:
            raise PipelineError(f"{path} has the key {name!r}, a {type(name).__name__}; use a string")
        Field(f"{path}, a name", name).name()
    return [[name, to_json(value, f"{path}, {name!r},")] for name, value in values.items()]


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


# --- random state -----------------------------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """The random state of torch, Python and, if it is loaded, NumPy; reading it does not need NumPy."""
    numpy = sys.modules.get("numpy")
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": None}
    if numpy is not None:
        name, key, *rest = numpy.random.get_state()
        state["numpy"] = (name, key.tolist(), *rest)
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the state that `random_state` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and state["numpy"] is not None:
        numpy.random.set_state(state["numpy"])


_LENGTH = 624  # words of a Mersenne Twister, which all three libraries use


def _random_to_json(state: Mapping[str, Any]) -> dict[str, Any]:
    version, (*words, position), gauss = state["python"]
    written: dict[str, Any] = {
        "torch": base64.b64encode(state["torch"].numpy().tobytes()).decode(),
        "python": [version, _words_to_json(words), position, to_json(gauss, "Python's random state")],
        "numpy": None,
    }
    if state["numpy"] is not None:
        kind, words, *rest = state["numpy"]
        if kind != "MT19937":
            raise PipelineError(
                f"NumPy's random generator is {kind}, but checkpoints can hold only the state of MT19937"
            )
        written["numpy"] = [kind, _words_to_json(words), *(to_json(value, "NumPy's random state") for value in rest)]
    return written


def _random_from_json(field: Field) -> dict[str, Any]:
    """The saved state, after trying it on generators of our own: setting it later must not fail half-way."""
    field.refuse_others(("torch", "python", "numpy"))
    return {
        "torch": _torch_state(field["torch"]),
        "python": _python_state(field["python"]),
        "numpy": None if field["numpy"].value is None else _numpy_state(field["numpy"]),
    }


def _torch_state(field: Field) -> torch.Tensor:
    generator = torch.Generator()
    try:
        data = bytearray(base64.b64decode(field.text(), validate=True))
        state = torch.frombuffer(data, dtype=torch.uint8)
        _accepted(field, lambda: generator.set_state(state))
        # PyTorch does not check that the words left and the next index match, and would read beyond the last word.
        left, _, following = struct.unpack_from("iiQ", data, 8)
    except (binascii.Error, ValueError, struct.error):
        raise field.wrong("a random state of PyTorch, in base64") from None
    if left + following > _LENGTH + 1 or not torch.equal(generator.get_state(), state):
        raise field.wrong("a valid random state of PyTorch")
    return state


def _python_state(field: Field) -> tuple[Any, ...]:
    if len(parts := [*field]) != 4:
        raise field.wrong("a version, words, a position and None or a float")
    words, position = _words(parts[1]), parts[2].integer(0, _LENGTH)
    state = (parts[0].integer(0), (*words, position), _float_or_none(parts[3]))
    generator = random.Random()
    _accepted(field, lambda: generator.setstate(state))
    if generator.getstate() != state:  # Python converts the states of its older versions
        raise FormatError(f"{field.path} is not a random state of this version of Python")
    return state


def _numpy_state(field: Field) -> tuple[Any, ...]:
    if len(parts := [*field]) != 5 or parts[0].value != "MT19937":
        raise field.wrong("a state of MT19937")
    words, position = _words(parts[1]), parts[2].integer(0, _LENGTH)  # NumPy accepts any position
    if (cached := _float_or_none(parts[4])) is None:
        raise parts[4].wrong("a float")
    return "MT19937", [*words], position, parts[3].integer(0, 1), cached


def _words_to_json(words: Sequence[int]) -> str:
    return base64.b64encode(struct.pack(f"<{len(words)}I", *words)).decode()


def _words(field: Field) -> tuple[int, ...]:
    try:
        return struct.unpack(f"<{_LENGTH}I", base64.b64decode(field.text(), validate=True))
    except (binascii.Error, ValueError, struct.error):
        raise field.wrong(f"{_LENGTH} words of 4 bytes, in base64") from None


def _float_or_none(field: Field) -> float | None:
    if (value := from_json(field)) is not None and type(value) is not float:
        raise field.wrong("a float")
    return value


def _accepted(field: Field, act: Callable[[], object]) -> None:
    try:
        act()
    except (RuntimeError, ValueError, TypeError, OverflowError):
        raise FormatError(f"{field.path} is not a random state") from None
