"""Versions: Python, Rota, PyTorch and the libraries it was built with. PyTorch is imported here, and may be missing."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rota.diagnosis.report import Finding

_NAMES = {"cuda": "CUDA", "rocm": "ROCm", "xpu": "XPU", "nccl": "NCCL"}


def versions() -> tuple[dict[str, str | None], str]:
    """The versions by name, None where there is none; and why PyTorch cannot be imported, "" if it can."""
    found = {"python": platform.python_version(), "rota": _installed("rota"), "torch": None}
    found |= dict.fromkeys(_NAMES)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch: Any = importlib.import_module("torch")
    except Exception as error:  # a library that is missing raises OSError, a broken installation anything
        return found, f"{type(error).__name__}: {error}"
    built_with = torch.version
    found |= {"torch": str(torch.__version__), "cuda": built_with.cuda, "rocm": built_with.hip}
    found["xpu"] = getattr(built_with, "xpu", None)
    with suppress(Exception):  # builds without it raise various errors
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found, ""


def findings(found: Mapping[str, str | None], error: str) -> list[Finding]:
    """What `versions` returned, as lines of the report."""
    lines = [
        Finding("ok", "Python", f"{found['python']}"),
        Finding("ok", "Rota", found["rota"] or "not installed, but run from its sources"),
    ]
    if error:
        lines.append(
            Finding("problem", "PyTorch", f"it cannot be imported: {error}", "install it: pip install 'rota[torch]'")
        )
    else:
        tested = _tested_versions()
        lines.append(Finding("ok", "PyTorch", f"{found['torch']}{tested and f' (Rota is made for {tested})'}"))
    lines += [Finding("ok", _NAMES[name], found[name] or "") for name in _NAMES if found[name]]
    return lines


def _installed(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _tested_versions() -> str:
    """The versions of PyTorch that Rota's package asks for, such as ">=2.10,<2.16"; "" if it is not installed."""
    with suppress(importlib.metadata.PackageNotFoundError):
        for requirement in importlib.metadata.requires("rota") or ():
            if match := re.match(r"torch\b(?!-)\s*\(?([<>=!~\d.,\s]+)", requirement):
                return match[1].strip()
    return ""
