"""The host: cores, memory, shared memory, limits, loopback and temporary folder, as a run's processes find them."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
import tempfile
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from rota.diagnosis.report import Section
from rota.units import count_text, size_text

_SHM_BYTES = 10**9  # what NCCL's documentation tells containers to have, --shm-size=1g
_TEMPORARY_BYTES = 10**8
_FILES_OF_RANK = 256  # PyTorch's own, and a handful of connections per other rank
_FILES_PER_RANK = 8  # that a rank, or the process that starts it, holds for each rank
_LITTLE_BYTES = 2 * 10**9  # a process with PyTorch and its libraries takes several hundred MB before it has a model
_CGROUP = Path("/sys/fs/cgroup")


@final
@dataclass(frozen=True, slots=True)
class Host:
    """What was found on this host; None: it is unknown. `error` texts are empty if all is well.

    Attributes:
        system: The operating system, such as "linux".
        kernel: Its release.
        num_cores: Cores that this process may use.
        quota_cores: How many cores' time its control group may use.
        memory_bytes: Memory, or the control group's limit if that is less.
        available_bytes: How much of it is available.
        shm_bytes: Size of /dev/shm.
        shm_free_bytes: How much of it is free.
        max_files: Most files and sockets per process (`ulimit -n`).
        max_files_allowed: The highest that `ulimit -n` can set (hard limit).
        temporary_folder: Where runs make their private folder.
        temporary_free_bytes: How much is free there.
        loopback_error: Why no connection over 127.0.0.1 can be made.
        pidfd_error: Why processes cannot be watched by `pidfd_open`.
    """

    system: str
    kernel: str
    num_cores: int
    quota_cores: float | None
    memory_bytes: int | None
    available_bytes: int | None
    shm_bytes: int | None
    shm_free_bytes: int | None
    max_files: int
    max_files_allowed: int
    temporary_folder: str
    temporary_free_bytes: int | None
    loopback_error: str
    pidfd_error: str


def look() -> Host:
    """Examine this host."""
    memory_bytes, available_bytes = _memory()
    shm = _disk("/dev/shm")
    folder = _temporary_folder()
    temporary = _disk(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Host(
        system=sys.platform,
        kernel=os.uname().release,
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        quota_cores=_quota_cores(),
        memory_bytes=memory_bytes,
        available_bytes=available_bytes,
        shm_bytes=shm[0] if shm else None,
        shm_free_bytes=shm[1] if shm else None,
        max_files=soft,
        max_files_allowed=hard,
        temporary_folder=folder,
        temporary_free_bytes=temporary[1] if temporary else None,
        loopback_error=_loopback_error(),
        pidfd_error=_pidfd_error(),
    )


def judge(host: Host, num_ranks: int, on_accelerators: bool) -> Section:
    """What is wrong with the host for a run of `num_ranks` processes on it."""
    section = Section("host")
    if host.system == "linux":
        section.ok("system", f"Linux {host.kernel}")
    else:
        section.problem(
            "system", f"{host.system} {host.kernel}", "run on Linux: `rota run` starts processes there only"
        )
    _judge_cores(section, host, num_ranks)
    _judge_memory(section, host, num_ranks)
    _judge_shm(section, host, on_accelerators)
    _judge_files(section, host, num_ranks)
    if host.temporary_free_bytes is None or host.temporary_free_bytes < _TEMPORARY_BYTES:
        free = "cannot be written to" if host.temporary_free_bytes is None else "has almost no room"
        remedy = "set TMPDIR to a local folder with 100 MB of room: the ranks meet in a private folder there"
        section.problem("temporary folder", f"{host.temporary_folder} {free}", remedy)
    else:
        section.ok("temporary folder", f"{host.temporary_folder}: {size_text(host.temporary_free_bytes)} free")
    if host.loopback_error:
        remedy = "bring the loopback interface up: ip link set lo up"
        section.problem("loopback", host.loopback_error, remedy)
    else:
        section.ok("loopback", "a connection over 127.0.0.1 works")
    if host.pidfd_error:
        remedy = "use Linux 5.3 or newer, and a container that allows pidfd_open: `rota run` watches its ranks with it"
        section.problem("processes", host.pidfd_error, remedy)
    return section


def _judge_cores(section: Section, host: Host, num_ranks: int) -> None:
    usable = host.num_cores if host.quota_cores is None else min(host.num_cores, host.quota_cores)
    quota = "" if host.quota_cores is None else f", of which the control group may use {host.quota_cores:g}"
    text = f"{count_text(host.num_cores, 'core')}{quota}, for {count_text(num_ranks, 'rank')}"
    if usable < num_ranks:
        remedy = "have a core per rank where time matters: ranks that share one wait for each other"
        section.warning("cores", text, remedy)
    else:
        section.ok("cores", text)


def _judge_memory(section: Section, host: Host, num_ranks: int) -> None:
    if host.memory_bytes is None or host.available_bytes is None:
        section.skipped("memory", "/proc/meminfo cannot be read")
        return
    text = f"{size_text(host.available_bytes)} of {size_text(host.memory_bytes)} available"
    if host.available_bytes < _LITTLE_BYTES * num_ranks // 2:
        remedy = f"close other programs, or run fewer ranks: each needs at least about {size_text(_LITTLE_BYTES // 2)}"
        section.warning("memory", f"{text}, for {count_text(num_ranks, 'rank')}", remedy)
    else:
        section.ok("memory", text)


def _judge_shm(section: Section, host: Host, on_accelerators: bool) -> None:
    if host.shm_bytes is None or host.shm_free_bytes is None:
        remedy = "mount a tmpfs there: NCCL and the workers of data loaders share memory through it"
        section.warning("/dev/shm", "there is none", remedy)
        return
    text = f"{size_text(host.shm_free_bytes)} of {size_text(host.shm_bytes)} free"
    if host.shm_free_bytes < _SHM_BYTES:
        who = "NCCL" if on_accelerators else "workers of data loaders"
        remedy = f"start the container with --shm-size=1g, or remount it larger: {who} may fail for lack of room there"
        section.warning("/dev/shm", text, remedy)
    else:
        section.ok("/dev/shm", text)


def _judge_files(section: Section, host: Host, num_ranks: int) -> None:
    needed = _FILES_OF_RANK + _FILES_PER_RANK * num_ranks
    text = f"{host.max_files:,} files and sockets per process (ulimit -n)"
    if 0 <= host.max_files < needed:
        can = "" if host.max_files_allowed < 0 else f" (up to {host.max_files_allowed:,} without asking root)"
        section.warning("limits", f"{text}, for {count_text(num_ranks, 'rank')}", f"ulimit -n {max(4096, needed)}{can}")
    else:
        section.ok("limits", "any number of files and sockets per process" if host.max_files < 0 else text)


# --- reading ----------------------------------------------------------------------------------------------------------


def _memory() -> tuple[int | None, int | None]:
    """Memory and how much of it is available, within the limit of the control group."""
    found: dict[str, int] = {}
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            found[name] = int(value.split()[0]) * 1024
    total, available = found.get("MemTotal"), found.get("MemAvailable")
    limit = _cgroup_number("memory.max")
    if total is None or available is None or limit is None or limit >= total:
        return total, available
    used = _cgroup_number("memory.current") or 0
    return int(limit), int(max(min(available, limit - used), 0))


def _quota_cores() -> float | None:
    """How many cores' time the control group may use."""
    words = _cgroup_text("cpu.max").split()
    if len(words) != 2 or words[0] == "max":
        return None
    with suppress(ValueError, ZeroDivisionError):
        return int(words[0]) / int(words[1])
    return None


def _cgroup_number(name: str) -> int | None:
    text = _cgroup_text(name).strip()
    return int(text) if text.isdecimal() else None


def _cgroup_text(name: str) -> str:
    """A file of this process's control group (version 2), or "" if it has none."""
    own = ""
    with suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next((line[3:] for line in lines if line.startswith("0::")), "")
    for folder in (_CGROUP / own.lstrip("/"), _CGROUP):
        with suppress(OSError):
            return (folder / name).read_text()
    return ""


def _disk(folder: str) -> tuple[int, int] | None:
    """Size and free room of the file system of a folder that can be written to, in bytes."""
    if not os.access(folder, os.W_OK):
        return None
    with suppress(OSError):
        usage = shutil.disk_usage(folder)
        return usage.total, usage.free
    return None


def _temporary_folder() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:
        return os.environ.get("TMPDIR", "/tmp")


def _loopback_error() -> str:
    """Why a connection over the loopback interface fails; "" if it works."""
    if not any(name in ("lo", "lo0") for _, name in socket.if_nameindex()):
        return "there is no loopback interface, lo"
    try:
        with closing(socket.create_server(("127.0.0.1", 0))) as server:
            server.settimeout(5)
            with closing(socket.create_connection(server.getsockname(), timeout=5)):
                server.accept()[0].close()
    except OSError as error:
        return f"no connection over 127.0.0.1: {error}"
    return ""


def _pidfd_error() -> str:
    """Why the launcher cannot watch processes; "" if it can."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return f"pidfd_open does not work here: {error}"
    return ""
