"""`rota.json`: which files a checkpoint has, and the facts that a reader needs first."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from rota import reading
from rota.errors import FormatError

FORMAT = 3
LONGEST_BITS = 4096  # of an integer; Python parses about 14,000


class File(NamedTuple):
    """The size of a file and its SHA-256 in hexadecimal digits, when it was written."""

    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> File:
        """The size and SHA-256 of `data`."""
        return cls(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True, slots=True)
class Manifest:
    """`rota.json`. `number` counts the saves: the newest has the highest, independent of its step.

    `weights`: the number of TP shards of each weight and buffer of the whole model, 1 for most. `aliases`: other names
    of tied weights, each with the name under which the weight is saved.
    """

    number: int
    step: int
    extra: dict[str, Any]
    num_ranks: int
    num_replicas: int
    weights: dict[str, int]
    aliases: dict[str, str]
    files: dict[str, File]

    def to_json(self) -> str:
        """The text of `rota.json`, with its own SHA-256."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        pairs = {of: [[name, value] for name, value in fields[of].items()] for of in ("weights", "files")}
        written = {"format": FORMAT, **fields, **pairs}
        checked = {**written, "sha256": digest({"rota": "checkpoint", **written})}
        return reading.dump("checkpoint", checked, Manifest.from_json)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """The manifest with this text. Raises FormatError that names the field."""
        document = reading.parse(text, "checkpoint")
        if (found := document["format"]).integer() != FORMAT:
            pickles = ", whose checkpoints hold pickles, which are no longer read" if found.integer() == 1 else ""
            writer = f"an earlier version of Rota{pickles}" if found.integer() < FORMAT else "a later version of Rota"
            raise found.wrong(f"{FORMAT}; it was saved by {writer}; use it with that version")
        document.refuse_others(("rota", "format", *cls.__slots__, "sha256"))
        manifest = cls(
            number=document["number"].integer(1),
            step=document["step"].integer(0),
            extra={name.name(): value.value for name, value in document["extra"].items()},
            num_ranks=document["num_ranks"].integer(1),
            num_replicas=document["num_replicas"].integer(1),
            weights={name: num_tp_shards.integer(1) for name, num_tp_shards in _pairs(document["weights"])},
            aliases={alias.name(): name.name() for alias, name in document["aliases"].items()},
            files={_inside(name, field): _file(field) for name, field in _pairs(document["files"])},
        )
        for alias, name in manifest.aliases.items():
            if alias in manifest.weights or name not in manifest.weights:
                raise document["aliases"].wrong("other names of the weights")
        if document["sha256"].text() != digest({k: v for k, v in document.value.items() if k != "sha256"}):
            raise FormatError("it has changed since it was saved")
        return manifest


def digest(document: dict[str, Any]) -> str:
    """The SHA-256 of a manifest's fields, independent of spacing and order. Raises FormatError."""
    try:
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
    except RecursionError:
        raise FormatError("it is nested too deep") from None


def pair(field: reading.Field) -> list[reading.Field]:
    """The two items of a list. Raises FormatError if it has more or fewer."""
    if len(found := [*field]) != 2:
        raise field.wrong("a pair")
    return found


def _pairs(field: reading.Field) -> Iterator[tuple[str, reading.Field]]:
    """Pairs of a name and its value. Raises FormatError if a name occurs twice."""
    seen: set[str] = set()
    for entry in field:
        name, value = pair(entry)
        if name.name() in seen:
            raise name.wrong("a name that occurs only once")
        seen.add(name.name())
        yield name.name(), value


def _inside(name: str, field: reading.Field) -> str:
    """`name`, if checkpoints have such a file: no such name leads out of the folder. Raises FormatError."""
    if not re.fullmatch(r"(plan|training|tensors)\.json|tensors-[0-9]{1,9}\.bin", name):
        raise FormatError(f"{field.path}: {reading.short(name)} is not the name of a checkpoint's file")
    return name


def _file(field: reading.Field) -> File:
    num_bytes, sha256 = pair(field)
    if not re.fullmatch("[0-9a-f]{64}", sha256.text()):
        raise sha256.wrong("a SHA-256 in 64 hexadecimal digits")
    return File(num_bytes.integer(0), sha256.text())


# --- the user's own values --------------------------------------------------------------------------------------------


def require_json(extra: dict[str, Any], path: str = "extra") -> None:
    """Raises FormatError if JSON cannot preserve a value exactly (a tuple, a tensor, an int as key)."""
    for key, value in extra.items():
        if type(key) is not str:
            raise FormatError(f"{path} has the key {key!r}, but JSON keys are strings: use {str(key)!r}")
        # Most are identifiers, and are seen so at once.
        if not (key.isascii() and key.isidentifier()) or len(key) > reading.LONGEST_NAME:
            reading.Field(f"{path}, a name", key).name()
        _require_json_value(value, f"{path}[{key!r}]")


def _require_json_value(value: Any, path: str) -> None:
    if type(value) is dict:
        require_json(value, path)
    elif type(value) is list:
        for item in value:
            _require_json_value(item, path)
    elif type(value) is str:
        if not value.isascii():
            reading.Field(path, value).text()
    elif type(value) is float and not math.isfinite(value):
        raise FormatError(f"{path} is {value}, which JSON cannot represent; give a finite number or a string")
    elif type(value) is int and value.bit_length() > LONGEST_BITS:
        raise FormatError(f"{path} is a number of {value.bit_length():,} bits, too many to read again; give a string")
    elif value is not None and type(value) not in (int, float, bool):
        raise FormatError(
            f"{path} holds {json.dumps(str(value))[:60]}, a {type(value).__name__}, which JSON cannot represent; "
            f"give numbers, strings, bools, None, lists and dicts of them"
        )
