"""A pretrained folder as Hugging Face writes it, straight into the stages of one process.

config.json                      is not read: the model is made from it before
model.safetensors                or, in several files,
model.safetensors.index.json     which file has which weight
model-00001-of-00004.safetensors …

Of each file only the header is read, and the bytes of local weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rota.core import reading
from rota.core.errors import FormatError
from rota.models import Stages
from rota.runtime.checkpoints.tensors import naming
from rota.runtime.checkpoints.values import DTYPES
from rota.runtime.checkpoints.weights import few, names_of
from rota.runtime.conversions import Source, converted
from rota.runtime.materializing import Init, give_memory

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(slots=True)
class _Stored:
    """A tensor of the folder."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | str

    def read(self) -> torch.Tensor:
        """Its values. The file is opened for them only: so what was read does not count as memory in use."""
        with _opened(self.path) as file:
            value: torch.Tensor = file.get_tensor(self.name)
            return value


def load_pretrained(
    stages: Stages,
    local: Iterable[int],
    folder: str | Path,
    *,
    cast: bool = False,
    may_differ: str | Iterable[str] = (),
    device: torch.device | str | None = None,
    init: Init | None = None,
) -> None:
    """Give memory to the `local` stages, with the weights and buffers of a pretrained folder; free that of all others.

    Buffers that are not saved keep the values that the model's constructor gave them. All names are checked, also those
    of other stages. A model of transformers has its weights renamed, joined and split as by `from_pretrained`. Names of
    a bare model (`layers.0…`) fit one with a head (`model.layers.0…`) as well.

    Args:
        stages: The stages of a whole model, best made in `rota.meta_init()`.
        local: The stages that this process runs, as `local_stages` gives them.
        folder: It has `model.safetensors`, or `model.safetensors.index.json` and its files.
        cast: Convert floating-point weights to the model's dtypes. Otherwise the folder must have these.
        may_differ: Patterns of names that only one of folder and model may have, such as ["score.*", "*.attn.bias"]; a
            text is one pattern. What the folder lacks stays as the constructor made it, or is initialized.
        device: Where to put the stages, such as `local_device()`: one weight at a time is read and copied there. None:
            where the model was made.
        init: Initializes what is missing, as in `rota.materialize`.

    Raises:
        FormatError: The folder cannot be read, or its tensors are not those of the model; lists them.
        PipelineError: A tensor that is not in the folder was on the meta device, and nobody has filled it.
    """
    local = sorted({*local})
    named = names_of(stages)
    stored = _stored(Path(folder))
    known = {name for names in named.values() for name in names}
    model = stages.unsplit if stages.unsplit is not None or len(stages) > 1 else stages[0]
    by_name = _renamed(known, converted(model if isinstance(model, nn.Module) else None, stored, known))
    by_tensor = _matched(named, by_name, Path(folder), may_differ)
    _refuse_other_kinds(by_tensor, cast, Path(folder))
    here = {tensor for stage in local for tensor in stages[stage].state_dict(keep_vars=True).values()}
    loaded = {tensor: sources for tensor, sources in by_tensor.items() if tensor in here}
    give_memory(stages, local, loaded, device, init)
    for tensor in sorted(loaded, key=lambda tensor: -tensor.nbytes):  # while little else is in memory
        _read(tensor, loaded[tensor])


# --- the folder -------------------------------------------------------------------------------------------------------


def _stored(folder: Path) -> dict[str, _Stored]:
    """All tensors of the folder by name, from the files' headers."""
    if not folder.is_dir():
        raise FormatError(f"{folder} is not a folder; give one with {_SINGLE} or {_INDEX}")
    if (folder / _INDEX).is_file():
        files: dict[str, set[str] | None] = {**_index(folder / _INDEX)}
    elif (folder / _SINGLE).is_file():
        files = {_SINGLE: None}
    else:
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        if pickles:
            raise FormatError(
                f"{folder} has {reading.printable(pickles[0])}, a pickle, which could run code as it is read; have it "
                "converted: from_pretrained(…) and save_pretrained(…) of transformers, where you trust it"
            )
        raise FormatError(f"{folder} has neither {_SINGLE} nor {_INDEX}; give a folder that save_pretrained has made")
    tensors: dict[str, _Stored] = {}
    for file, names in files.items():
        in_file = {stored.name: stored for stored in _header(folder / file)}
        if names is not None and (lacking := sorted(names - in_file.keys())):
            raise FormatError(f"{folder / file} lacks {few(lacking)}, which {_INDEX} says is there; get it again")
        tensors |= in_file if names is None else {name: in_file[name] for name in names}
    return tensors


def _index(path: Path) -> dict[str, set[str]]:
    """By file the tensors that it has. All files are beside the index."""
    files: dict[str, set[str]] = {}
    with naming(path):
        weight_map = reading.Field("index", reading.load(reading.read_text(path)))["weight_map"]
        for name, file in weight_map.read(dict[str, str]).items():
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise weight_map[name].wrong("the name of a .safetensors file in the same folder")
            files.setdefault(file, set()).add(name)
    return files


def _header(path: Path) -> Iterator[_Stored]:
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            yield _Stored(path, name, tuple(part.get_shape()), DTYPES.get(part.get_dtype(), part.get_dtype()))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file; raises FormatError where it is none."""
    from safetensors import SafetensorError, safe_open

    try:
        reading.require_regular(path)
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise FormatError(f"cannot read {path}: {error}; get it again") from None


# --- names, shapes and dtypes -----------------------------------------------------------------------------------------


def _matched(
    named: Mapping[torch.Tensor, tuple[str, ...]],
    by_name: Mapping[str, Source],
    folder: Path,
    may_differ: str | Iterable[str],
) -> dict[torch.Tensor, list[Source]]:
    """What the folder has of each tensor, by any of its names. Raises FormatError with the names that do not fit."""
    known = {name for names in named.values() for name in names}
    by_tensor = {tensor: [by_name[name] for name in names if name in by_name] for tensor, names in named.items()}
    lacking = _without((named[tensor][0] for tensor, sources in by_tensor.items() if not sources), may_differ)
    more = _without((name for name in by_name if name not in known), may_differ)
    if lacking or more:
        differences = [f"{words} {few(names)}" for words, names in (("lacks", lacking), ("has also", more)) if names]
        raise FormatError(
            f"{folder} is not this model: it {' and '.join(differences)}; make the model that it is of. If they "
            "shall differ, may_differ=[…] initializes weights that the folder lacks, and leaves out those of the folder"
        )
    return {tensor: sources for tensor, sources in by_tensor.items() if sources}


def _renamed(known: set[str], stored: Mapping[str, Source]) -> dict[str, Source]:
    """By the model's names, where all names of one have a word in front that those of the other lack."""
    ways = [{name: name for name in stored}]
    ways += [{name: f"{first}.{name}" for name in stored} for first in sorted(_first_words(known))]
    ways += [{name: name.removeprefix(f"{first}.") for name in stored} for first in sorted(_first_words(stored))]
    best = max(ways, key=lambda way: len(known.intersection(way.values())))
    return {best[name]: source for name, source in stored.items()}


def _first_words(names: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in names if "." in name}


def _without(names: Iterable[str], patterns: str | Iterable[str]) -> list[str]:
    """The names that fit none of the patterns; a text is one pattern."""
    patterns = [patterns] if isinstance(patterns, str) else [*patterns]
    return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns)]


def _refuse_other_kinds(by_tensor: Mapping[torch.Tensor, Sequence[Source]], cast: bool, folder: Path) -> None:
    """Raises FormatError with all tensors whose shapes or dtypes are not the model's."""
    shapes, dtypes = [], []
    for tensor, sources in by_tensor.items():
        for stored in sources:
            if stored.shape != tuple(tensor.shape):
                shapes.append(f"{stored.name} is {[*stored.shape]}, in the model {[*tensor.shape]}")
            are_floats = all(isinstance(t, torch.dtype) and t.is_floating_point for t in (stored.dtype, tensor.dtype))
            if stored.dtype != tensor.dtype and not (cast and are_floats):
                dtypes.append(f"{stored.name} is {stored.dtype}, in the model {tensor.dtype}")
    if shapes:
        raise FormatError(f"{folder} has other shapes than the model: {few(shapes)}; make the model that it is of")
    if dtypes:
        raise FormatError(
            f"{folder} has other dtypes than the model: {few(dtypes)}; make the model with these, or convert them by "
            "load_pretrained(…, cast=True)"
        )


@torch.no_grad()
def _read(tensor: torch.Tensor, sources: Sequence[Source]) -> None:
    """Fill a tensor."""
    for source in sources:
        value = source.read()
        if source is sources[0]:
            tensor.copy_(value)
        elif not torch.equal(tensor, value.to(tensor.device, tensor.dtype)):
            raise FormatError(
                f"{source.path}: {source.name} has other values than {sources[0].name}, but the model has them as "
                "one tied weight; make the model without the tie"
            )
