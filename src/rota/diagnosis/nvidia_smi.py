"""What the driver's own tool tells, and PyTorch does not: driver version, PCIe, and how devices are connected."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

_TIMEOUT_S = 30  # it hangs where the driver does
_FIELDS = (
    *("index", "uuid", "name", "driver_version", "memory.total", "memory.used", "compute_mode", "mig.mode.current"),
    *("pcie.link.gen.max", "pcie.link.width.max", "pcie.link.width.current"),
)


@final
@dataclass(frozen=True, slots=True)
class Device:
    """A device as nvidia-smi lists it; None: it does not tell.

    Attributes:
        index: Its number there, which need not be PyTorch's.
        uuid: "GPU-" and what PyTorch calls its uuid.
        name: Its name.
        driver: The version of the driver.
        compute_mode: "Default", "Exclusive_Process" or "Prohibited".
        has_mig: Whether it is divided into slices (MIG).
        pcie_generation: The newest generation of PCIe that device and slot have.
        pcie_lanes: The most lanes that device and slot have.
        pcie_lanes_now: The lanes that work now.
    """

    index: int
    uuid: str
    name: str
    driver: str
    compute_mode: str
    has_mig: bool
    pcie_generation: int | None
    pcie_lanes: int | None
    pcie_lanes_now: int | None


@final
@dataclass(frozen=True, slots=True)
class Driver:
    """The devices of the machine, and the ways between them by their numbers: "NV18", "PIX", … `error`: why none."""

    devices: tuple[Device, ...] = ()
    ways: Mapping[tuple[int, int], str] | None = None
    error: str = ""


def look(run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> Driver:
    """Ask nvidia-smi. Never raises: `error` says why nothing is known."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Driver(error="there is no nvidia-smi")
    try:
        query = [program, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
        listed = run(query, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S)
        if listed.returncode:
            words = (listed.stdout + listed.stderr).strip().splitlines() or ["no output"]
            return Driver(error=f"nvidia-smi failed: {words[-1][:200]}")
        matrix = run([program, "topo", "-m"], capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Driver(error=f"nvidia-smi did not answer within {_TIMEOUT_S} s: perhaps the driver hangs")
    except OSError as error:
        return Driver(error=f"nvidia-smi cannot be run: {error.strerror}")
    return Driver(devices(listed.stdout), ways(matrix.stdout) if not matrix.returncode else None)


def devices(text: str) -> tuple[Device, ...]:
    """The devices in the answer to the query; lines that are not of its form are left out."""
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != len(_FIELDS) or not row[0].strip().isdecimal():
            continue
        of = dict(zip(_FIELDS, (value.strip() for value in row), strict=True))
        numbers = (_number(of[name]) for name in _FIELDS[-3:])
        has_mig = of["mig.mode.current"] == "Enabled"
        texts = of["uuid"], of["name"], of["driver_version"], of["compute_mode"]
        found.append(Device(int(of["index"]), *texts, has_mig, *numbers))
    return tuple(found)


def ways(text: str) -> dict[tuple[int, int], str]:
    """The matrix of `nvidia-smi topo -m`, in both directions.

            GPU0    GPU1    NIC0    CPU Affinity
    GPU0     X      NV18    PIX     0-55
    GPU1    NV18     X      SYS     0-55
    """
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()  # older versions underline the header
    columns: list[str] = []
    found = {}
    for line in lines:
        words = [word.strip() for word in line.split("\t") if word.strip()]
        if not columns and words and re.fullmatch(r"GPU\d+", words[0]) and not re.search(r"\bX\b", line):
            columns = words
        elif columns and words and re.fullmatch(r"GPU\d+", words[0]):
            for column, way in zip(columns, words[1:], strict=False):
                if re.fullmatch(r"GPU\d+", column) and way != "X":
                    found[int(words[0][3:]), int(column[3:])] = way
    return found


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None  # "[N/A]"
