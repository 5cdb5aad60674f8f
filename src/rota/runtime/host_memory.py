"""How much memory the host has, and has left."""

from __future__ import annotations

from pathlib import Path


def available_bytes() -> int | None:
    """Memory available to new processes, by the machine and the control group; None if the system has no figure."""
    found = []
    machine = Path("/proc/meminfo")
    if machine.exists():
        lines = dict(line.split(":") for line in machine.read_text().splitlines())
        found.append(1024 * int(lines["MemAvailable"].split()[0]))
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").exists() and (limit := (group / "memory.max").read_text().strip()) != "max":
        found.append(int(limit) - int((group / "memory.current").read_text()))
    return min(found, default=None)


def total_bytes() -> int | None:
    """Memory that processes may use, by the machine and the control group; None if the system has no figure."""
    found = []
    machine = Path("/proc/meminfo")
    if machine.exists():
        lines = dict(line.split(":") for line in machine.read_text().splitlines())
        found.append(1024 * int(lines["MemTotal"].split()[0]))
    group = Path("/sys/fs/cgroup/memory.max")
    if group.exists() and (limit := group.read_text().strip()) != "max":
        found.append(int(limit))
    return min(found, default=None)
