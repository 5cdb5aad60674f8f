"""A folder of checkpoints: whole ones are named `step-N`, and nothing else ever is.

    step-20.partial/  being written, by all ranks ──one rename──▶  step-20/  whole
    step-20.replaced/ what step-20 was, while it is saved again  ──▶  removed, or put back after a crash

Inside: `rota.json` (the list of all files, and what a reader has to know first), `plan.json`, `training.pt` (small
things: optimizer options, scheduler, random state), and the tensors as `torch.distributed.checkpoint` writes them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rota import reading
from rota.errors import FormatError

MANIFEST, PLAN, TRAINING = "rota.json", "plan.json", "training.pt"
METADATA = ".metadata"  # of torch.distributed.checkpoint
_FORMAT = 1
_LONGEST_BITS = 4096  # of a whole number; Python reads some 14,000


class File(NamedTuple):
    """What a file was when it was written."""

    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> File:
        with path.open("rb") as file:
            return cls(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


@dataclass(frozen=True, slots=True)
class Manifest:
    """`rota.json`. `number` counts the saves: the newest has the highest, whatever its step.

    `weights`: for each weight and buffer of the whole model the number of parts it is saved in, 1 mostly. `aliases`:
    further names of tied weights, each with the name that the weight is saved by.
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
        fields = {name: getattr(self, name) for name in self.__slots__}
        weights, files = ([[name, value] for name, value in fields[of].items()] for of in ("weights", "files"))
        return reading.dump("checkpoint", {"format": _FORMAT, **fields, "weights": weights, "files": files})

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Raises FormatError, naming the field."""
        document = reading.parse(text, "checkpoint")
        if (found := document["format"]).integer() != _FORMAT:
            raise found.wrong(f"{_FORMAT}; read it with the version of Rota that wrote it")
        return cls(
            number=document["number"].integer(1),
            step=document["step"].integer(0),
            extra={name.name(): value.value for name, value in document["extra"].items()},
            num_ranks=document["num_ranks"].integer(1),
            num_replicas=document["num_replicas"].integer(1),
            weights={name: num_parts.integer(1) for name, num_parts in _pairs(document["weights"])},
            aliases={alias.name(): name.name() for alias, name in document["aliases"].items()},
            files={_inside(name, field): _file(field) for name, field in _pairs(document["files"])},
        )


def _pair(field: reading.Field) -> list[reading.Field]:
    if len(pair := [*field]) != 2:
        raise field.wrong("a pair")
    return pair


def _pairs(field: reading.Field) -> Iterator[tuple[str, reading.Field]]:
    """Names, each there once, with what belongs to them."""
    seen: set[str] = set()
    for entry in field:
        name, value = _pair(entry)
        if name.name() in seen:
            raise name.wrong("another name than those before it")
        seen.add(name.name())
        yield name.name(), value


def _inside(name: str, field: reading.Field) -> str:
    """The name of a file in the checkpoint's own folder: none that leads out of it."""
    if name in (".", "..") or "/" in name or "\\" in name:
        raise FormatError(f"{field.path}: {name!r} is no file of the checkpoint's own folder")
    return name


def _file(field: reading.Field) -> File:
    num_bytes, sha256 = _pair(field)
    if not re.fullmatch("[0-9a-f]{64}", sha256.text()):
        raise sha256.wrong("a SHA-256 in 64 hexadecimal digits")
    return File(num_bytes.integer(0), sha256.text())


@dataclass(frozen=True, slots=True)
class Saved:
    """A whole checkpoint on disk."""

    path: Path
    manifest: Manifest

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.manifest.files.values())

    def require_files(self) -> None:
        """Raises FormatError where a file is missing or has another size; the contents are not read."""
        for name, file in self.manifest.files.items():
            path = self.path / name
            size = path.stat().st_size if path.is_file() else None
            if size != file.num_bytes:
                told = "is missing" if size is None else f"has {size:,} bytes instead of {file.num_bytes:,}"
                raise FormatError(f"{path} {told}; remove {self.path} to go on from the checkpoint before it")


def read_saved(path: Path) -> Saved:
    """The checkpoint in `path`. Raises FormatError."""
    text = reading.read_text(path / MANIFEST)
    try:
        return Saved(path, Manifest.from_json(text))
    except FormatError as error:
        raise FormatError(f"{path / MANIFEST}: {error}; remove {path} to do without this checkpoint") from None


def whole_ones(folder: Path) -> list[Saved]:
    """All whole checkpoints, as they were saved one after another; a folder that is not there has none."""
    return sorted(map(read_saved, whole_paths(folder)), key=lambda saved: saved.manifest.number)


def whole_paths(folder: Path) -> list[Path]:
    """Where whole checkpoints are, in no order, and unread."""
    named = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return [path for path in named if (path / MANIFEST).exists()]


def unfinished_ones(folder: Path) -> list[Path]:
    """What is not whole: a save that was cut off or is still going on, a copy that was cut off."""
    return sorted(path for path in folder.glob("step-*") if path.suffix or not (path / MANIFEST).exists())


def mend(folder: Path) -> None:
    """Make the folder, and put right or remove what saves that were cut off have left in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("step-*.replaced"):
        if path.with_suffix("").exists():
            shutil.rmtree(path)
        else:  # cut off between the two renames of `publish`
            path.rename(path.with_suffix(""))
    for path in folder.glob("step-*.partial"):
        shutil.rmtree(path)


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write the checkpoint into."""
    mend(folder)
    (partial := folder / f"step-{step}.partial").mkdir()
    return partial


def publish(partial: Path, manifest: Manifest, keep: int | None) -> None:
    """Make a fully written folder the newest whole checkpoint, then keep only the `keep` newest."""
    write_synced(partial / MANIFEST, manifest.to_json().encode())
    _sync(partial)
    path, replaced = partial.with_suffix(""), partial.with_suffix(".replaced")
    if path.exists():
        path.rename(replaced)
    partial.rename(path)
    _sync(path.parent)
    if replaced.exists():
        shutil.rmtree(replaced)
    if keep is not None:
        for saved in whole_ones(path.parent)[:-keep]:
            _remove(saved.path)


def next_number(folder: Path) -> int:
    """The number of the next save."""
    return max((saved.manifest.number for saved in whole_ones(folder)), default=0) + 1


def write_synced(path: Path, data: bytes) -> None:
    """Write a file so that it is still there after a power cut."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    """First by name: a removal that is cut off must not leave half a checkpoint with a whole one's name."""
    shutil.rmtree(path.rename(path.with_suffix(".partial")))


def _sync(folder: Path) -> None:
    """Make the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_json(extra: dict[str, Any], path: str = "extra") -> None:
    """Raises FormatError where a value would not come back from JSON as it is (a tuple, a tensor, an int as key)."""
    for key, value in extra.items():
        if type(key) is not str:
            raise FormatError(f"{path} has the key {key!r}, and JSON has only texts as keys: use {str(key)!r}")
        reading.Field(f"{path}, a name", key).name()
        for item in value if type(value) is list else [value]:
            _require_json_value(item, f"{path}[{key!r}]")


def _require_json_value(value: Any, path: str) -> None:
    if type(value) is dict:
        require_json(value, path)
    elif type(value) is list:
        for item in value:
            _require_json_value(item, path)
    elif type(value) is float and not math.isfinite(value):
        raise FormatError(f"{path} is {value}, which JSON cannot say; give a finite number, or a text")
    elif type(value) is int and value.bit_length() > _LONGEST_BITS:
        raise FormatError(f"{path} is a number of {value.bit_length():,} bits, which cannot be read again; give a text")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise FormatError(
            f"{path} holds {json.dumps(str(value))[:60]}, a {type(value).__name__}, which JSON cannot say; "
            f"give numbers, texts, bools, None, lists and dicts of them"
        )
