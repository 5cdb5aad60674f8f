"""`.metadata`, in which `torch.distributed.checkpoint` keeps where each tensor is: a pickle, read without trust.

A pickle can run any function that it names. This reader knows the dozen names that such a file needs, none of which
does anything, and refuses all others. What it let pass, PyTorch's own reader then unpickles to fetch the tensors,
themselves read with `weights_only=True`.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, final

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from rota.errors import FormatError
from rota.runtime.checkpoint_files import METADATA

_KNOWN = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
        *("TensorStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    **dict.fromkeys(("pathlib", "pathlib._local"), ("PosixPath", "WindowsPath")),
}


@final
class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _KNOWN.get(module, ()):
            raise FormatError(f"it names {module[:40]!r}, {name[:40]!r}, which no list of tensors needs")
        return super().find_class(module, name)


def read_metadata(folder: Path) -> Metadata:
    """Of the checkpoint in `folder`. Raises FormatError, and runs nothing, where it is another or a damaged file."""
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise FormatError("it holds no list of tensors")
        if any(isinstance(entry, BytesStorageMetadata) for entry in metadata.state_dict_metadata.values()):
            raise FormatError("it holds other things than tensors")
        for place in (metadata.storage_data or {}).values():
            if Path(place.relative_path).name != place.relative_path:
                raise FormatError(f"it places a tensor in {place.relative_path!r}, outside of the checkpoint's folder")
    except FormatError as error:
        raise FormatError(f"{path}: {error}; it was not written by rota.Checkpoints, do not use it") from None
    except Exception as error:  # a damaged pickle may raise anything
        told = f"{type(error).__name__}: {error}"
        raise FormatError(f"{path} cannot be read ({told}); the checkpoint is damaged") from None
    return metadata
