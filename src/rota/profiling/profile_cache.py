"""Profiles on disk, and what they are valid for: a stale profile is refused."""

from __future__ import annotations

import hashlib
import inspect
import platform
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, final

import torch

from rota.core import reading, writing
from rota.core.errors import FormatError, RotaError, UsageError
from rota.core.layers import LayerCosts, Profile
from rota.models import Stages
from rota.runtime.messages import describe, flatten
from rota.runtime.precision import ambient_autocast


@final
class ProfileCache:
    """The profile of a model so far, and its file, if it has one; every addition is written at once."""

    def __init__(self, identity: Mapping[str, str], path: Path | None, known: Profile | None) -> None:
        self.path, self._identity, self._known = path, identity, known
        self._asked: list[int] = []

    @classmethod
    def of(cls, where: str | Path | None, name: str, identity: Mapping[str, str], refresh: bool) -> ProfileCache:
        """The cache in `where`: a file, or a folder with a file for `name`. Raises UsageError, FormatError."""
        if where is None:
            return cls(identity, None, None)
        path = Path(where)
        if path.is_dir() or not path.suffix:
            path = path / f"{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-').lower()}.json"
        if refresh or not path.exists():
            return cls(identity, path, None)
        try:
            known = Profile.from_json(reading.read_text(path))
        except RotaError as error:
            raise FormatError(f"{path}: {error}; remove it, or profile again with refresh=True (--refresh)") from None
        cache = cls(identity, path, known)
        cache._refuse_stale(identity)
        return cache

    def knows(self, rows: int) -> bool:
        """Whether there is an entry for `rows`, for whatever inputs."""
        return self._known is not None and rows in self._known

    def has(self, rows: int, inputs: Mapping[str, str]) -> bool:
        """Whether there is an entry for `rows`. Raises UsageError if it is for other inputs."""
        self._asked.append(rows)
        if not self.knows(rows):
            return False
        self._refuse_stale(inputs)
        return True

    def _refuse_stale(self, now: Mapping[str, str]) -> None:
        then = dict(self._known.key) if self._known else {}
        differing = [
            f"{name} was {_in_line(then.get(name, 'not given'))}, is {value}"
            for name, value in now.items()
            if then.get(name) != value
        ]
        if differing:
            raise UsageError(
                f"the profile {self.path} is stale: {'; '.join(differing)}. Profile again with refresh=True "
                f"(--refresh), or name another file"
            )

    def add(self, layers: LayerCosts, inputs: Mapping[str, str]) -> None:
        """Add an entry, instead of an older one for these rows, and write the file."""
        key = {**self._identity, **inputs}
        self._known = self._known.with_layers(layers, key) if self._known else Profile((layers,), tuple(key.items()))
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            writing.write_text(self.path, self._known.to_json())
        except OSError as error:
            raise UsageError(f"cannot write the profile {self.path}: {error.strerror}; give another cache") from None

    @property
    def profile(self) -> Profile:
        """The layers for the numbers of rows that `has` was asked for."""
        assert self._known is not None
        return Profile(tuple(self._known[rows] for rows in self._asked), self._known.key)


def _in_line(value: str) -> str:
    """The value itself, if it is printable and short, else a shortened form."""
    return value if value.isprintable() and len(value) <= reading.LONGEST_NAME else reading.short(value)


# --- what a profile is valid for --------------------------------------------------------------------------------------


def identity_of(
    stages: Stages, loss_fn: Callable[..., Any] | None, optimizer: Callable[..., Any] | None
) -> dict[str, str]:
    """What must not change for a profile to stay valid, by name, except the device and the inputs."""
    autocast = ", ".join(f"{kind} {str(dtype)[6:]}" for kind, dtype in ambient_autocast())
    return {
        "model": _structure(stages),
        "source of the model's classes": _sources(stages),
        "loss_fn": _function(loss_fn),
        "optimizer": _function(optimizer),
        "autocast": autocast or "off",
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def inputs_of(batch: Any, target: Any) -> str:
    """Structure, dtypes and shapes of a micro-batch."""
    return f"{describe(flatten(batch, 'the batch')[1])}, target {describe(flatten(target, 'the target')[1])}"


def _structure(stages: Stages) -> str:
    """Modules with their options, and each parameter and buffer by name, shape, dtype and whether it is trained."""
    parts = [f"{module!r} {module.training}" for module in stages.modules]
    for module in stages.modules:
        tensors = (*module.named_parameters(), *module.named_buffers())
        parts += [f"{name} {list(t.shape)} {t.dtype} {t.requires_grad}" for name, t in tensors]
    parts += [f"{edge} {edge.key}" for edge in stages.edges] + [str(stages.inputs)]
    num_parameters = sum(parameter.numel() for parameter in {p for m in stages.modules for p in m.parameters()})
    return f"{len(stages)} layers, {num_parameters:,} parameters, {_digest(parts)}"


def _sources(stages: Stages) -> str:
    """A hash of the sources of all classes except PyTorch's, for which the version is enough; or names."""
    classes = {type(inner) for module in stages.modules for inner in module.modules()}
    own = [cls for cls in classes if not cls.__module__.startswith("torch.")]
    return _digest(sorted(_source(cls) for cls in own))


def _source(definition: Any) -> str:
    try:
        return f"{definition.__qualname__} {inspect.getsource(definition)}"
    except (OSError, TypeError):
        return f"{definition.__module__}.{definition.__qualname__}"


def _function(function: Callable[..., Any] | None) -> str:
    if function is None:
        return "none"
    if isinstance(function, partial):
        return f"{_function(function.func)} {function.args} {function.keywords}"
    if not hasattr(function, "__qualname__"):  # an object that is called, such as nn.CrossEntropyLoss()
        return f"{function!r} {_digest([_source(type(function))])}"
    return f"{function.__qualname__} {_digest([_source(function)])}"


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
