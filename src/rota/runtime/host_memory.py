"""How much memory the host has."""

from __future__ import annotations

from pathlib import Path

_MACHINE, _GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


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
