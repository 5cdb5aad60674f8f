"""Checkpoints read by one process: whether all of one is there, and its model as one file."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from rota.errors import FormatError
from rota.runtime.checkpoint_files import MANIFEST, File, Saved, read_saved, whole_paths
from rota.runtime.checkpoint_metadata import read_metadata
from rota.runtime.checkpoint_names import model_key
from rota.writing import whole_file


def paths_in(path: Path) -> list[Path]:
    """`path` itself if it is a checkpoint, or all in the folder `path`. Raises FormatError if there is none."""
    if not (found := [path] if (path / MANIFEST).exists() else whole_paths(path)):
        raise FormatError(f"no whole checkpoint in {path}; give a folder with step-N inside, or such a step-N")
    return sorted(found)


def newest(path: Path) -> Saved:
    """Of those in `paths_in`."""
    return max(map(read_saved, paths_in(path)), key=lambda saved: saved.manifest.number)


def damages(saved: Saved) -> list[str]:
    """What is wrong with a checkpoint, compared with the hashes of when it was saved; empty if nothing is.

    Only if all files are what they were, the metadata are read: then every tensor must be covered by them.
    """
    return [*_changed_files(saved)] or [*_gaps(saved)]


def _changed_files(saved: Saved) -> Iterator[str]:
    for name, file in saved.manifest.files.items():
        path = saved.path / name
        if not path.is_file():
            yield f"{name} is missing"
        elif (found := File.of(path)).num_bytes != file.num_bytes:
            yield f"{name} has {found.num_bytes:,} bytes instead of {file.num_bytes:,}"
        elif found != file:
            yield f"{name} has other contents than when it was saved"


def _gaps(saved: Saved) -> Iterator[str]:
    metadata = read_metadata(saved.path)
    for name, num_parts in saved.manifest.weights.items():
        for key in [name] if num_parts == 1 else [f"{name}#{part}" for part in range(num_parts)]:
            if model_key(key) not in metadata.state_dict_metadata:
                yield f"{key} has no tensor"
    for key, tensor in metadata.state_dict_metadata.items():
        if isinstance(tensor, TensorStorageMetadata):
            covered = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
            if covered != math.prod(tensor.size):
                yield f"{key} has {covered:,} of {math.prod(tensor.size):,} numbers"
            for chunk in tensor.chunks:
                yield from _misplaced(metadata, saved, MetadataIndex(key, chunk.offsets))


def _misplaced(metadata: Metadata, saved: Saved, index: MetadataIndex) -> Iterator[str]:
    place: Any = metadata.storage_data.get(index)
    file = saved.manifest.files.get(place.relative_path) if place is not None else None
    if file is None or place.offset + place.length > file.num_bytes:
        yield f"{index.fqn} is in none of its files"


def export(saved: Saved, path: Path) -> int:
    """Write the whole model, weights and buffers by their names, into one safetensors file; returns their number.

    Of a tied weight the aliases stand in the file's metadata, as `safetensors.torch.save_model` puts them there.
    Raises FormatError where weights are in parts, and where the checkpoint is damaged.
    """
    from safetensors.torch import save_file

    if found := damages(saved):
        raise FormatError(f"{saved.path}: {found[0]}; remove it, and export the checkpoint before it")
    parts = [name for name, num_parts in saved.manifest.weights.items() if num_parts > 1]
    if parts:
        raise FormatError(
            f"{saved.path} has {parts[0]} in {saved.manifest.weights[parts[0]]} parts, and does not know how they are "
            f"joined; load it on as many tensor-parallel ranks, and join them there"
        )
    stored: dict[str, Any] = read_metadata(saved.path).state_dict_metadata
    wanted = {
        name: torch.empty(stored[model_key(name)].size, dtype=stored[model_key(name)].properties.dtype)
        for name in saved.manifest.weights
    }
    read = {model_key(name): tensor for name, tensor in wanted.items()}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")  # as it is meant to be
        load(read, storage_reader=FileSystemReader(saved.path), planner=planner, no_dist=True)
    with whole_file(path) as partial:
        save_file(wanted, partial, metadata={"format": "pt", **saved.manifest.aliases})
    return len(wanted)
