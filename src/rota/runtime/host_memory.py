"""The host's memory: how much there is, and what glibc's malloc does with memory that a step has freed."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_MACHINE, _GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
# glibc, malloc.h, and the variables with which a user sets the same
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES")
#: PyTorch asks for huge pages for tensors of 2 MiB or more, if this variable is set when it allocates its first one. It
#: has no effect where the system refuses them: /sys/kernel/mm/transparent_hugepage/enabled.
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}


def available_bytes() -> int | None:
    """Memory available to new processes, by the machine and the control group; None if the system has no figure."""
    limit, machine = _group_limit_bytes(), _machine_bytes("MemAvailable")
    left = None if limit is None else limit - int((_GROUP / "memory.current").read_text())
    return min((figure for figure in (machine, left) if figure is not None), default=None)


def total_bytes() -> int | None:
    """Memory that processes may use, by the machine and the control group; None if the system has no figure."""
    figures = (_machine_bytes("MemTotal"), _group_limit_bytes())
    return min((figure for figure in figures if figure is not None), default=None)


def _machine_bytes(name: str) -> int | None:
    if not _MACHINE.exists():
        return None
    lines = dict(line.split(":") for line in _MACHINE.read_text().splitlines())
    return 1024 * int(lines[name].split()[0])


def _group_limit_bytes() -> int | None:
    file = _GROUP / "memory.max"
    limit = file.read_text().strip() if file.exists() else "max"
    return None if limit == "max" else int(limit)


def keep_freed_memory() -> None:
    """Let this process keep what it frees for its next buffers; nothing happens if it does not use glibc's malloc.

    By default, how often memory goes back to the system, and comes again page by page, depends on where the first
    buffers lie. Those of more than 32 MiB still have pages of their own. A user's settings are left as they are.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _BY_USER):
        return
    if (set_option := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        set_option(_ARENA_MAX, 1)  # an empty arena of another thread is returned whatever the thresholds
        set_option(_MMAP_THRESHOLD, 32 << 20)  # the largest that glibc accepts
        set_option(_TRIM_THRESHOLD, 2**31 - 1)
        set_option(_TOP_PAD, 16 << 20)  # bytes that are fetched at once
