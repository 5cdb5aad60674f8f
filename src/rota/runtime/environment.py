"""What surrounds a rank: the launcher's environment variables, the machine's cores, its parent and its user."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path
from uuid import uuid4

from rota.core.errors import PipelineError
from rota.core.text import count_text

STORE = "ROTA_STORE"  # the file in which the ranks meet
FOLDER = "ROTA_FOLDER"  # the run's, with its plan, its script and the ranks' records
RESTART = "ROTA_RESTART"  # how often the ranks were started again
TIMEOUT_S = "ROTA_TIMEOUT_S"  # what `rota run --timeout` says
KEPT_MEMORY = "ROTA_KEPT_MEMORY"  # the folder of the rank's snapshots
MESH = "ROTA_MESH"  # dp, pp and tp
DEVICE = "ROTA_DEVICE"  # what `rota run --device` says
PROGRESS = "ROTA_PROGRESS"  # set where the first process is to say how the training goes


def meeting_environments(folder: str, num_processes: int) -> list[dict[str, str]]:
    """The environment of each of the processes on this machine that meet through a new file in `folder`.

    They listen only on the loopback interface. Nothing listens at MASTER_PORT: it is there for scripts that read it.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        STORE: str(Path(folder, f"store-{uuid4().hex}")),
        "GLOO_SOCKET_IFNAME": loopback(),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_processes)]


def processes_here() -> int:
    """How many processes of the run are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shared_cores(num_ranks: int) -> str:
    """What it means for planned times that `num_ranks` ranks on this machine share its cores; "" if each has one."""
    if num_ranks <= num_cores():
        return ""
    return (
        f"{num_ranks} ranks share {count_text(num_cores(), 'core')}: the plan's times assume a core per rank, so "
        f"steps can take {num_ranks / num_cores():.1f} times as long"
    )


def cores_of(num_ranks: int) -> int | None:
    """The cores that `num_ranks` ranks share, if they are all processes of the run and all are on this machine."""
    alone = {os.environ.get(name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")} == {str(num_ranks)}
    return num_cores() if alone else None


def loopback() -> str:
    """The name of the loopback interface, which no other machine reaches."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if not names:
        raise PipelineError("this machine has no loopback interface, lo; bring it up with `ip link set lo up`")
    return names[0]


def say(text: str) -> None:
    """Print one line for the user."""
    print(f"rota: {text}", file=sys.stderr, flush=True)


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process as soon as the thread that started it has ended.

    `parent`: the process that started this one; if it is gone already this process ends here. None: not known.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
