"""A checkpoint on disk: `rota.json`, the index, and the ranks' files that it lists. None of them is trusted.

rota.json           the files with their digests, and what the training was; it is written last
rank-N.safetensors  tensors, and all other state, as rank N wrote them
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count, takewhile
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from rota.core import reading
from rota.core.errors import FormatError, RotaError
from rota.core.plan import Plan
from rota.core.reading import Field, Positive, Whole, short
from rota.core.writing import whole_file
from rota.runtime.checkpoints.optimizer_state import tensor_key
from rota.runtime.checkpoints.state import TrainingState, read_training
from rota.runtime.checkpoints.tensors import (
    File,
    Index,
    Reader,
    index_of,
    naming,
    read_file,
    require_covered,
    require_unchanged,
)
from rota.runtime.checkpoints.values import DTYPES
from rota.runtime.checkpoints.weights import model_key

MANIFEST = "rota.json"
FORMAT = 6


def file_of(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank}.safetensors"


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`rota.json`. `number` counts the saves: the newest has the highest, independent of its step.

    `extra` is JSON of the values. `names`: of all weights and buffers of the whole model. `aliases`: other names of
    tied weights, each with the name under which the weight is saved. `files`: those of ranks 0, 1, …; `plan` is JSON of
    which nothing is checked here.
    """

    number: Positive
    step: Whole
    extra: dict[str, Any]
    num_ranks: Positive
    num_replicas: Positive
    names: tuple[reading.Name, ...]
    aliases: dict[reading.Name, reading.Name]
    files: Annotated[tuple[File, ...], Meta(min_length=1)]
    plan: Any

    def to_json(self) -> str:
        """The text of `rota.json`, with its own SHA-256."""
        fields = {"format": FORMAT, **msgspec.to_builtins(self)}
        return reading.dump("checkpoint", {**fields, "sha256": digest({"rota": "checkpoint", **fields})})

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """The manifest with this text. Raises FormatError that names the field."""
        document = reading.parse(text, "checkpoint")
        if (written_as := document["format"]).read(int) != FORMAT:
            writer = "an earlier" if written_as.value < FORMAT else "a later"
            raise written_as.wrong(f"{FORMAT}; it was saved by {writer} version of Rota; use it with that version")
        sha256 = document["sha256"].value
        checked = {name: value for name, value in document.value.items() if name != "sha256"}
        fields = {name: value for name, value in checked.items() if name != "format"}
        manifest: Manifest = Field(document.path, fields).read(cls)
        names = {*manifest.names}
        if not manifest.aliases.keys().isdisjoint(names) or not names.issuperset(manifest.aliases.values()):
            raise document["aliases"].wrong("other names of the weights")
        if sha256 != digest(checked):
            raise FormatError("it has changed since it was saved")
        return manifest


def digest(document: dict[str, Any]) -> str:
    """The SHA-256 of a manifest's fields, independent of spacing and order. Raises FormatError."""
    try:
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
    except RecursionError:
        raise FormatError("it is nested too deep") from None


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint on disk whose manifest has been read."""

    path: Path
    manifest: Manifest

    @property
    def num_bytes(self) -> int:
        """Bytes of all files of tensors."""
        return sum(file.num_bytes for file in self.manifest.files)


def read_saved(path: Path) -> Saved:
    """The checkpoint in `path`, from its manifest alone. Raises FormatError."""
    manifest = path / MANIFEST
    with suppress(OSError):  # `read_text` says what is wrong
        reading.require_regular(manifest, follow=False)
    text = reading.read_text(manifest)
    with naming(manifest):
        return Saved(path, Manifest.from_json(text))


@dataclass(frozen=True, slots=True)
class Contents:
    """All that a checkpoint has besides the bytes of tensors. `keys`: of each weight's tensors, one per TP shard."""

    plan: Plan
    training: TrainingState
    index: Index
    keys: dict[str, list[str]]


def read_contents(saved: Saved) -> Contents:
    """Read all but the tensors. Raises FormatError if a header has changed since it was saved, or does not fit."""
    path, manifest = saved.path, saved.manifest
    with naming(path / MANIFEST):
        try:
            plan = Plan.from_fields(Field("plan", manifest.plan))
        except RotaError as error:
            raise FormatError(str(error)) from None
    files = [read_file(path / file_of(rank), file) for rank, file in enumerate(manifest.files)]
    with naming(path):
        training = read_training(field for _, field in files)
        if training.first.step != manifest.step:
            raise FormatError(f"its files are of step {training.first.step}, and {MANIFEST} is of step {manifest.step}")
        index = index_of(part for parts, _ in files for part in parts)
        require_covered(index)
        keys = {name: _keys_of(name, index) for name in manifest.names}
        expected = {*chain.from_iterable(keys.values())}
        expected |= {tensor_key(key, name) for key, record in training.records.items() for name in record.tensors}
        for key in sorted(expected ^ index.keys()):
            raise FormatError(f"{short(key)} {'has no tensor' if key in expected else 'is a tensor that nothing uses'}")
        for key in training.records:
            if model_key(key) not in index:
                raise FormatError(f"the optimizer has a state of {short(key)}, which is not a weight")
    return Contents(plan, training, index, keys)


def _keys_of(name: str, index: Index) -> list[str]:
    shards = [*takewhile(index.__contains__, (model_key(f"{name}#{shard}") for shard in count()))]
    return shards if len(shards) > 1 and model_key(name) not in index else [model_key(name)]


# --- in a single process ----------------------------------------------------------------------------------------------


def damage(saved: Saved) -> str | None:
    """What is wrong with a checkpoint, whose tensors are all read; None if nothing is wrong."""
    try:
        for part in chain.from_iterable(read_contents(saved).index.values()):
            require_unchanged(part)
    except FormatError as error:
        return str(error)
    return None


def export(saved: Saved, path: Path) -> int:
    """Write the whole model, weights and buffers by their names, into one safetensors file; returns their number.

    A tied weight is in it once, and its other names are in the file's metadata, as `safetensors.torch.save_model` and
    transformers write them. Raises FormatError if the checkpoint is damaged, if weights are in several TP shards, or if
    `path` cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        contents = read_contents(saved)
        chunks = {key: contents.index[key][0].chunk for key in chain.from_iterable(contents.keys.values())}
        tensors = {key: torch.empty(chunk.size, dtype=DTYPES[chunk.dtype]) for key, chunk in chunks.items()}
        Reader(contents.index, tensors).fill()
    except FormatError as error:
        raise FormatError(f"{error}; remove {saved.path}, and export the checkpoint before it") from None
    if sharded := [name for name, keys in contents.keys.items() if len(keys) > 1]:
        raise FormatError(
            f"{saved.path} has {sharded[0]} in {len(contents.keys[sharded[0]])} TP shards, and does not say how to "
            f"join them; load it on as many tensor-parallel ranks, and join them there"
        )
    named = {name: tensors[model_key(name)] for name in contents.keys}
    try:
        with whole_file(path) as partial:
            save_file(named, partial, metadata={**saved.manifest.aliases, "format": "pt"})
    except OSError as error:
        raise FormatError(f"cannot write {path}: {error.strerror}; give another path with -o") from None
    except (SafetensorError, KeyError, ValueError) as error:
        raise FormatError(f"{saved.path} cannot be written as safetensors: {error}") from None
    return len(named)
