"""Reading checkpoints: to load them, and, in a single process, to verify and export them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from rota.core.errors import FormatError, RotaError
from rota.core.plan import Plan
from rota.core.reading import Field, printable, short
from rota.core.writing import whole_file
from rota.runtime.checkpoints.checkpoint_folder import is_checkpoint, readable_ones
from rota.runtime.checkpoints.manifest import MANIFEST, Manifest, Saved, naming, read_saved
from rota.runtime.checkpoints.optimizer_state import tensor_key
from rota.runtime.checkpoints.state import TrainingState
from rota.runtime.checkpoints.tensors import Index, Reader, check, read_index
from rota.runtime.checkpoints.weights import model_key


@dataclass(frozen=True, slots=True)
class Contents:
    """All that a checkpoint has besides the bytes of tensors."""

    plan: Plan
    training: TrainingState
    index: Index


def read_contents(saved: Saved) -> Contents:
    """Read all but the tensors. Raises FormatError if a header has changed since it was saved, or if they do not match.

    Of the rest of the files, only the sizes are compared.
    """
    for wrong in saved.wrong_files():
        raise FormatError(f"{saved.path}: {wrong}")
    with naming(saved.path / MANIFEST):
        training = TrainingState.from_json(Field("training", saved.manifest.training))
        try:
            plan = Plan.from_fields(Field("plan", saved.manifest.plan))
        except RotaError as error:
            raise FormatError(str(error)) from None
    index = read_index(saved)
    for wrong in _wrong_keys(saved.manifest, training, index):
        raise FormatError(f"{saved.path}: {wrong}")
    return Contents(plan, training, index)


def _wrong_keys(manifest: Manifest, training: TrainingState, index: Index) -> Iterator[str]:
    """Which tensors are missing, and which are not used."""
    names = islice(_keys_of(manifest), len(index) + 1)  # there may be a billion shards
    expected = {model_key(name) for name in names}
    expected |= {tensor_key(key, name) for key, record in training.records.items() for name in record.tensors}
    for key in sorted(expected - index.keys()):
        yield f"{printable(key.removeprefix(model_key('')))} has no tensor"
    for key in sorted(index.keys() - expected):
        yield f"{short(key)} is a tensor that nothing uses"
    for key in training.records:
        if model_key(key) not in index:
            yield f"the optimizer has a state of {short(key)}, which is not a weight"


def _keys_of(manifest: Manifest) -> Iterator[str]:
    """The keys of all weights and buffers, one per TP shard."""
    for name, num_tp_shards in manifest.weights.items():
        yield from [name] if num_tp_shards == 1 else (f"{name}#{tp_shard}" for tp_shard in range(num_tp_shards))


def find(path: Path) -> tuple[list[Saved], list[tuple[Path, FormatError]]]:
    """The checkpoint `path`, or all in the folder `path` in the order they were saved; and those that cannot be read.

    Raises FormatError if there are none.
    """
    if not is_checkpoint(path):
        whole, damaged = readable_ones(path)
        if not (whole or damaged):
            raise FormatError(f"no whole checkpoint in {path}; give a folder that has a step-N, or a step-N itself")
        return whole, damaged
    try:
        return [read_saved(path)], []
    except FormatError as error:
        return [], [(path, error)]


def damages(saved: Saved) -> list[str]:
    """What is wrong with a checkpoint, whose tensors are all read; empty if nothing is wrong."""
    if wrong := [*saved.wrong_files()]:
        return wrong
    try:
        check(part for parts in read_contents(saved).index.values() for part in parts)
    except FormatError as error:
        return [str(error)]
    return []


def export(saved: Saved, path: Path) -> int:
    """Write the whole model, weights and buffers by their names, into one safetensors file; returns their number.

    A tied weight is in it once, and its other names are in the file's metadata, as `safetensors.torch.save_model` and
    transformers write them. Raises FormatError if weights are in several TP shards, if the checkpoint is damaged, and
    if `path` cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if wrong := damages(saved):
        raise FormatError(f"{saved.path}: {wrong[0]}; remove it, and export the checkpoint before it")
    sharded = [name for name, num_tp_shards in saved.manifest.weights.items() if num_tp_shards > 1]
    if sharded:
        raise FormatError(
            f"{saved.path} has {sharded[0]} in {saved.manifest.weights[sharded[0]]} TP shards, and does not say how "
            f"to join them; load it on as many tensor-parallel ranks, and join them there"
        )
    index = read_contents(saved).index
    chunks = {name: index[model_key(name)][0].chunk for name in saved.manifest.weights}
    wanted = {name: torch.empty(chunk.size, dtype=chunk.dtype) for name, chunk in chunks.items()}
    Reader(index, {model_key(name): tensor for name, tensor in wanted.items()}).fill()
    try:
        with whole_file(path) as partial:
            save_file(wanted, partial, metadata={**saved.manifest.aliases, "format": "pt"})
    except OSError as error:
        raise FormatError(f"cannot write {path}: {error.strerror}; give another path with -o") from None
    except (SafetensorError, KeyError, ValueError) as error:
        raise FormatError(f"{saved.path} cannot be written as safetensors: {error}") from None
    return len(wanted)
