"""Versions: Python, Rota, PyTorch and the libraries it was built with. PyTorch is imported here, and may be missing."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import re
import warnings
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, final

from rota.diagnosis.nvidia_smi import Driver
from rota.diagnosis.report import Section

_INSTALL = "pip install 'rota[torch]'"


@final
class Software:
    """What is installed. `torch` is None where it cannot be imported, and `error` says why."""

    def __init__(self) -> None:
        self.torch: ModuleType | None = None
        self.error = ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.torch = importlib.import_module("torch")
        except Exception as error:  # a library that is missing raises OSError, a broken installation anything
            self.error = f"{type(error).__name__}: {error}"

    def facts(self, driver: Driver) -> dict[str, Any]:
        """All versions; None where there is none."""
        torch: Any = self.torch
        return {
            "python": platform.python_version(),
            "rota": _version("rota"),
            "torch": None if torch is None else str(torch.__version__),
            "cuda": None if torch is None else torch.version.cuda,
            "rocm": None if torch is None else torch.version.hip,
            "xpu": None if torch is None else getattr(torch.version, "xpu", None),
            "nccl": self._nccl(),
            "driver": driver.devices[0].driver if driver.devices else _driver_of_kernel(),
        }

    def _nccl(self) -> str | None:
        """The version of NCCL (RCCL on ROCm) that PyTorch uses."""
        if self.torch is None:
            return None
        with suppress(Exception):  # builds without it raise various errors
            return ".".join(map(str, self.torch.cuda.nccl.version()))
        return None


def judge(software: Software, facts: dict[str, Any], driver: Driver) -> Section:
    """Whether these versions run Rota."""
    section = Section("software")
    python, rota = facts["python"], facts["rota"]
    section.ok("Python", python)
    section.ok("Rota", rota or "not installed, but run from its sources")
    _judge_torch(section, software, facts)
    kind = next((name for name in ("cuda", "rocm", "xpu") if facts[name]), None)
    if software.torch is None:
        return section
    if kind is None:
        _judge_cpu_build(section, driver)
        return section
    names = {"cuda": "CUDA", "rocm": "ROCm", "xpu": "XPU"}
    section.ok(names[kind], f"{facts[kind]}, which PyTorch was built with")
    if facts["driver"]:
        section.ok("driver", facts["driver"])
    else:
        section.skipped("driver", f"its version is unknown{f': {driver.error}' if driver.error else ''}")
    if facts["nccl"]:
        section.ok("NCCL" if kind == "cuda" else "RCCL", facts["nccl"])
    elif kind != "xpu":
        remedy = "install PyTorch's own build, from pytorch.org: devices cannot exchange messages without it"
        section.problem("NCCL", "this PyTorch was built without it", remedy)
    return section


def _judge_torch(section: Section, software: Software, facts: dict[str, Any]) -> None:
    if software.torch is None:
        if software.error.startswith("ModuleNotFoundError: No module named 'torch'"):
            section.problem("PyTorch", "it is not installed", _INSTALL)
        else:
            section.problem("PyTorch", f"it cannot be imported: {software.error}", f"install it again: {_INSTALL}")
        return
    least, ceiling = _range_of_torch()
    version = _numbers(facts["torch"])
    wanted = f"Rota has been tested with {'.'.join(map(str, least))} or newer, below {'.'.join(map(str, ceiling))}"
    if least and version < least:
        section.problem("PyTorch", f"{facts['torch']}; {wanted}", f"{_INSTALL} --upgrade")
    elif ceiling and version >= ceiling:
        remedy = "install an older PyTorch if the self-test below fails"
        section.warning("PyTorch", f"{facts['torch']} is newer than any tested version; {wanted}", remedy)
    else:
        section.ok("PyTorch", facts["torch"])
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        remedy = "install PyTorch's own build, from pytorch.org: ranks meet and agree over Gloo"
        section.problem("Gloo", "this PyTorch was built without it", remedy)


def _judge_cpu_build(section: Section, driver: Driver) -> None:
    if driver.devices:
        remedy = "install the CUDA build from pytorch.org to use them"
        names = ", ".join(dict.fromkeys(device.name for device in driver.devices))
        section.warning("CUDA", f"this PyTorch is a CPU build, but the machine has {names}", remedy)
    else:
        section.skipped("CUDA, NCCL, driver", "this PyTorch is a CPU build, and nvidia-smi lists no device")


def _version(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _range_of_torch() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The oldest version of PyTorch that Rota asks for, and the first that it excludes; () if that is not told."""
    least: tuple[int, ...] = ()
    ceiling: tuple[int, ...] = ()
    with suppress(importlib.metadata.PackageNotFoundError):
        for requirement in importlib.metadata.requires("rota") or ():
            if re.match(r"torch\b(?!-)", requirement):
                for sign, version in re.findall(r"(>=|<)\s*([\d.]+)", requirement.partition(";")[0]):
                    least, ceiling = (_numbers(version), ceiling) if sign == ">=" else (least, _numbers(version))
    return least, ceiling


def _numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cpu -> (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _driver_of_kernel() -> str | None:
    """The version of the NVIDIA or AMD driver that the kernel has loaded."""
    for path, pattern in (
        ("/proc/driver/nvidia/version", r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s"),
        ("/sys/module/amdgpu/version", r"(\S+)"),
    ):
        with suppress(OSError):
            if match := re.search(pattern, Path(path).read_text()):
                return match[1]
    return None
