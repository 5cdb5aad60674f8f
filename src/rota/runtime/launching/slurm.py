"""What Slurm tells each task of a job step: which node it is on, and which node is the first."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from rota.errors import UsageError

_FIRST_PORT, _NUM_PORTS = 20000, 10000  # below the ports that Linux gives to connections


class Step(NamedTuple):
    """A job step with one task per node; `host` and `port` are where node 0 listens."""

    num_nodes: int
    node: int
    host: str
    port: int


def step_of(environment: Mapping[str, str]) -> Step | None:
    """The step of several nodes that this process is a task of; None if it is none, such as in a batch script.

    Raises UsageError if the step has another number of tasks than nodes.
    """
    given = {name: environment.get(f"SLURM_{name}", "") for name in ("STEP_NUM_NODES", "STEP_NUM_TASKS", "NODEID")}
    if not all(value.isdecimal() for value in given.values()) or int(given["STEP_NUM_NODES"]) < 2:
        return None
    num_nodes, num_tasks, node = (int(value) for value in given.values())
    if num_tasks != num_nodes:
        raise UsageError(
            f"srun started {num_tasks} tasks on {num_nodes} nodes; start one per node, which starts its ranks: "
            f"srun --ntasks-per-node=1"
        )
    host = first_host(environment.get("SLURM_STEP_NODELIST", ""))
    numbers = [environment.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID")]
    port = _FIRST_PORT + sum(int(number) for number in numbers if number.isdecimal()) % _NUM_PORTS
    return Step(num_nodes, node, host, port)


def first_host(hosts: str) -> str:
    """The first host of a list as Slurm writes it: "n[03-05,9],login" -> "n03". Raises UsageError without one."""
    match = re.match(r"(?:[^,\[\]\s]|\[\d[\d,-]*\])+", hosts)
    if match is None:
        raise UsageError(f"SLURM_STEP_NODELIST={hosts!r} names no host; name node 0 with --head HOST:PORT")
    return re.sub(r"\[(\d+)[\d,-]*\]", r"\1", match[0])
