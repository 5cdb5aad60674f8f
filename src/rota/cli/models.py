"""A model from the user's own Python file, named on the command line as FILE.py:FUNCTION."""

from __future__ import annotations

import runpy
from typing import TYPE_CHECKING

from rota import reading
from rota.cli import files

if TYPE_CHECKING:
    from torch import nn


def load_model(spec: str) -> nn.Module:
    """What the function returns, called without arguments. The file is run, as Python would run it.

    Raises InputError where there is no such function, or where it fails or returns no module.
    """
    files.require("torch", "torch")
    from torch import nn

    path, colon, name = spec.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise files.InputError(f"--model {spec}: give FILE.py:FUNCTION, such as model.py:make_model")
    reading.read_text(path)
    try:
        found = runpy.run_path(path, run_name="rota_model")
    except Exception as error:
        raise files.InputError(f"--model {spec}: running {path} raised {_told(error)}") from error
    if not callable(found.get(name)):
        raise files.InputError(f"--model {spec}: {path} has no function {name!r}; define it, or name another")
    try:
        model = found[name]()
    except Exception as error:
        raise files.InputError(f"--model {spec}: {name}() raised {_told(error)}") from error
    if not isinstance(model, nn.Module):
        raise files.InputError(f"--model {spec}: {name}() returned a {type(model).__name__}; return an nn.Module")
    return model


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
