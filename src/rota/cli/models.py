"""A model from the user's own Python file, named on the command line as FILE.py:FUNCTION."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rota import reading
from rota.cli import files

if TYPE_CHECKING:
    from torch import nn


def load_model_shape(spec: str) -> nn.Module:
    """What the function returns, called without arguments, on the meta device, where weights take no memory.

    The file is run as `python FILE.py` would run it: what lies beside it can be imported. Where the function needs
    numbers, its weights are made after all, and that is told. Raises InputError where there is no such function, or
    where it fails or returns no module.
    """
    files.require("torch", "torch")
    from torch import nn

    path, colon, name = spec.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise files.InputError(f"--model {spec}: give FILE.py:FUNCTION, such as model.py:make_model")
    reading.read_text(path)
    with _importing_beside(path):
        try:
            found = runpy.run_path(path, run_name="rota_model")
        except Exception as error:
            raise files.InputError(f"--model {spec}: running {path} raised {_told(error)}") from error
        make = found.get(name)
        if not callable(make):
            raise files.InputError(f"--model {spec}: {path} has no function {name!r}; define it, or name another")
        try:
            model = _made_on_meta(make, name)
        except Exception as error:
            raise files.InputError(f"--model {spec}: {name}() raised {_told(error)}") from error
    if not isinstance(model, nn.Module):
        raise files.InputError(f"--model {spec}: {name}() returned a {type(model).__name__}; return an nn.Module")
    return model


def _made_on_meta(make: Callable[[], object], name: str) -> object:
    import torch

    try:
        with torch.device("meta"):
            return make()
    except RuntimeError as error:  # such as by asking a tensor without numbers for one
        print(f"{name}() makes its weights, as on the meta device it raised {_told(error)}", file=sys.stderr)
    return make()


@contextmanager
def _importing_beside(path: str) -> Iterator[None]:
    """Modules in the folder of the file at `path` can be imported, as `python path` has it."""
    folder = os.path.dirname(os.path.abspath(path))
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
