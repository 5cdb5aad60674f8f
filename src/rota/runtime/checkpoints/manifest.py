"""`rota.json`, the index of a checkpoint, and the files that it lists. None of them is trusted.

rota.json           the files, and all of the training besides tensors; it is written last
rank-N.safetensors  tensors, as rank N wrote them
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from rota.core import reading
from rota.core.errors import FormatError, PipelineError
from rota.core.reading import Positive, Whole

MANIFEST = "rota.json"
FORMAT = 5
_PIECE_BYTES = 2**22


class File(NamedTuple):
    """A rank's file as it was written: its size, its header's SHA-256 in hexadecimal digits, each tensor's CRC-32."""

    num_bytes: Whole
    head_sha256: str
    crc32: tuple[Annotated[int, Meta(ge=0, lt=2**32)], ...]


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

    number: Positive
    step: Whole
    extra: dict[str, Any]
    num_ranks: Positive
    num_replicas: Positive
    weights: dict[reading.Name, Positive]
    aliases: dict[reading.Name, reading.Name]
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
        if (written_as := document["format"]).read(int) != FORMAT:
            writer = "an earlier" if written_as.value < FORMAT else "a later"
            raise written_as.wrong(f"{FORMAT}; it was saved by {writer} version of Rota; use it with that version")
        sha256 = document["sha256"].value
        written = {name: value for name, value in document.value.items() if name != "sha256"}
        fields = {name: value for name, value in written.items() if name != "format"}
        manifest = reading.Field(document.path, fields).read(cls)
        for alias, name in manifest.aliases.items():
            if alias in manifest.weights or name not in manifest.weights:
                raise document["aliases"].wrong("other names of the weights")
        if sha256 != digest(written):
            raise FormatError("it has changed since it was saved")
        return manifest


def digest(document: dict[str, Any]) -> str:
    """The SHA-256 of a manifest's fields, independent of spacing and order. Raises FormatError."""
    try:
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
    except RecursionError:
        raise FormatError("it is nested too deep") from None


# --- on disk ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint on disk whose manifest has been read."""

    path: Path
    manifest: Manifest

    @property
    def num_bytes(self) -> int:
        """Bytes of all files of tensors."""
        return sum(file.num_bytes for file in self.manifest.files)

    def wrong_files(self) -> Iterator[str]:
        """What is wrong with the files, one by one, without reading them: missing, of a wrong size, or not listed."""
        try:
            entries = {entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(self.path)}
        except OSError as error:
            raise FormatError(f"cannot read {self.path}: {error.strerror}") from None
        entries.pop(MANIFEST, None)
        for rank, file in enumerate(self.manifest.files):
            name = file_of(rank)
            if (entry := entries.pop(name, None)) is None:
                yield f"{name} is missing"
            elif not stat.S_ISREG(entry.st_mode):
                yield f"{name} is not a regular file"
            elif entry.st_size != file.num_bytes:
                yield f"{name} has {entry.st_size:,} bytes instead of {file.num_bytes:,}"
        for name in sorted(entries):
            yield f"{reading.printable(name)} is not listed in {MANIFEST}"


def read_saved(path: Path) -> Saved:
    """The checkpoint in `path`, from its manifest alone. Raises FormatError."""
    manifest = path / MANIFEST
    with suppress(OSError):  # `read_text` says what is wrong
        reading.require_regular(manifest, follow=False)
    text = reading.read_text(manifest)
    with naming(manifest):
        return Saved(path, Manifest.from_json(text))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Puts the file's path in front of FormatErrors that are raised inside."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None


@contextmanager
def opened(path: Path) -> Iterator[FileIO]:
    """Open a regular file to read it. Raises FormatError for anything else, also for a link to one."""
    try:
        with reading.open_file(path, follow=False) as file:
            yield file
    except FileNotFoundError:
        raise FormatError(f"{path} is missing") from None
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror}") from None


def pieces(file: FileIO, num_bytes: int) -> Iterator[memoryview]:
    """The next `num_bytes` of a file, or fewer at its end, in pieces; each piece overwrites the one before."""
    buffer = memoryview(bytearray(min(num_bytes, _PIECE_BYTES)))
    while num_bytes and (count := file.readinto(buffer[: min(num_bytes, _PIECE_BYTES)])):
        yield buffer[:count]
        num_bytes -= count


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


def require_step(step: object) -> None:
    """Raises PipelineError if it is not the number of a step, or too large to be read again."""
    if type(step) is not int or not 0 <= step <= reading.LARGEST:
        raise PipelineError(f"step={step!r}; give a whole number from 0 to {reading.LARGEST:,}")
