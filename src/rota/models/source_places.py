"""Where in the user's code something happens: lines of files that are neither Rota's nor PyTorch's."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import rota.core

_FOLDERS = Path(torch.__file__).parent, Path(rota.core.__file__).parents[1]
NOT_THE_USERS = ("<", *(f"{folder}{os.sep}" for folder in _FOLDERS))


def user_place(frames: Iterable[tuple[FrameType, int]]) -> str:
    """`file:line (source line)` of the first frame, innermost first, that is neither torch's nor Rota's."""
    for frame, line in frames:
        file = frame.f_code.co_filename
        if is_users(file):
            return f"{file}:{line} ({getline(file, line).strip()})"
    return "an unknown line"


def place_now() -> str:
    """The place in the user's code that is running."""
    return user_place(traceback.walk_stack(None))


def is_users(file: str) -> bool:
    """Whether a file of Python code is neither torch's nor Rota's."""
    return not file.startswith(NOT_THE_USERS)


def autograd_function_now() -> type | None:
    """The class of the innermost `torch.autograd.Function` whose forward runs."""
    classes: list[Any] = list(torch.autograd.Function.__subclasses__())
    for function in classes:  # grows: subclasses of subclasses
        classes += function.__subclasses__()
    forwards = {getattr(function.forward, "__code__", None): function for function in classes}
    codes = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe()))
    return next((forwards[code] for code in codes if code in forwards), None)


def describe_function(function: Any) -> str:
    """A function by its name and the place where it is defined."""
    original = getattr(function, "_torchdynamo_orig_callable", None)
    if original is not None:
        return f"torch.compile of {describe_function(original)}"
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"
