"""`rota.json`, the index of a checkpoint: its files, and all of the training besides tensors. Written last."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from rota import reading
from rota.errors import FormatError, PipelineError

MANIFEST = "rota.json"
FORMAT = 4


class File(NamedTuple):
    """A rank's file as it was written: its size, its header's SHA-256 in hexadecimal digits, each tensor's CRC-32."""

    num_bytes: int
    head_sha256: str
    crc32: tuple[int, ...]

    @classmethod
    def from_json(cls, field: reading.Field) -> File:
        """The file with this JSON. Raises FormatError that names the field."""
        if len(parts := [*field]) != 3:
            raise field.wrong("a size, a SHA-256 and checksums")
        if not re.fullmatch("[0-9a-f]{64}", parts[1].text()):
            raise parts[1].wrong("a SHA-256 in 64 hexadecimal digits")
        return cls(parts[0].integer(0), parts[1].text(), parts[2].integers(0, 2**32 - 1))


def file_of(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank}.safetensors"


@dataclass(frozen=True, slots=True)
class Manifest:
    """`rota.json`. `number` counts the saves: the newest has the highest, independent of its step.

    `weights`: the number of TP shards of each weight and buffer of the whole model, 1 for most. `aliases`: other names
    of tied weights, each with the name under which the weight is saved. `files`: those of ranks 0, 1, …; `plan` and
    `training` are JSON of which nothing is checked here.
    """

    number: int
    step: int
    extra: dict[str, Any]
    num_ranks: int
    num_replicas: int
    weights: dict[str, int]
    aliases: dict[str, str]
    files: tuple[File, ...]
    plan: Any
    training: Any

    def to_json(self) -> str:
        """The text of `rota.json`, with its own SHA-256."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        written = {"format": FORMAT, **fields}
        checked = {**written, "sha256": digest({"rota": "checkpoint", **written})}
        return reading.dump("checkpoint", checked)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """The manifest with this text. Raises FormatError that names the field."""
        document = reading.parse(text, "checkpoint")
        if (found := document["format"]).integer() != FORMAT:
            writer = "an earlier" if found.integer() < FORMAT else "a later"
            raise found.wrong(f"{FORMAT}; it was saved by {writer} version of Rota; use it with that version")
        document.refuse_others(("rota", "format", *cls.__slots__, "sha256"))
        manifest = cls(
            number=document["number"].integer(1),
            step=document["step"].integer(0),
            extra={name.value: value.value for name, value in document["extra"].items()},
            num_ranks=document["num_ranks"].integer(1),
            num_replicas=document["num_replicas"].integer(1),
            weights={name.name(): num_tp_shards.integer(1) for name, num_tp_shards in document["weights"].items()},
            aliases={alias.name(): name.name() for alias, name in document["aliases"].items()},
            files=tuple(map(File.from_json, document["files"])),
            plan=document["plan"].value,
            training=document["training"].value,
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


# --- the user's own values --------------------------------------------------------------------------------------------


def require_json(extra: dict[str, Any]) -> None:
    """Raises PipelineError if JSON cannot preserve a value exactly (a tuple, a tensor, an int as key)."""
    for name, value in extra.items():
        try:
            is_same = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError, RecursionError):  # ValueError: also of a huge integer
            is_same = False
        if not is_same:
            raise PipelineError(
                f"extra[{name!r}], a {type(value).__name__}, would not come back from JSON as it is; give finite "
                f"numbers, strings, bools, None, and lists and dicts of them whose keys are strings"
            )
