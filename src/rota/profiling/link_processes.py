"""Measures links between processes: new ones on this machine, or those that a launcher started.

python -m rota.profiling.link_processes FOLDER
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from rota.costs import Cluster
from rota.errors import PipelineError
from rota.profiling.links import measure_links
from rota.runtime import control
from rota.runtime.device.local import AUTO, device_environment, device_type, local_device
from rota.runtime.launching.launch import start
from rota.runtime.launching.rank_processes import RankFailed, Ranks
from rota.runtime.launching.requests import Requests
from rota.runtime.launching.run_folder import run_folder
from rota.runtime.orphans import end_with_parent
from rota.runtime.process_group import join

_CLUSTER, _LINES = "cluster.json", "lines.txt"


def is_launched() -> bool:
    """Whether torchrun, or something like it, has started this process as one of several."""
    return "RANK" in os.environ


def links_of_launched(report: Callable[[str], None] = lambda _: None) -> Cluster | None:
    """The links of the launcher's processes, on the first of them; None on the others. `report`: as `measure_links`.

    Messages are between the processes' `local_device`s.
    """
    owns = join()
    try:
        cluster = measure_links(device=local_device(), report=report)
        return cluster if dist.get_rank() == 0 else None
    finally:
        if owns:
            dist.destroy_process_group()


def links_of_started(num_processes: int, device: str = AUTO, report: Callable[[str], None] = lambda _: None) -> Cluster:
    """The links of `num_processes` new processes on this machine.

    Args:
        num_processes: 2 or more.
        device: What each one has: "cpu", the type of an accelerator, or "auto", as `local_device` takes it.
        report: As `measure_links`.

    Raises:
        PipelineError: There are too few processes or devices, or one fails.
    """
    if num_processes < 2:
        raise PipelineError(f"num_processes is {num_processes}: a link needs 2")
    device_type(device, num_processes)
    with run_folder("rota-links-") as folder, Requests() as requests, Ranks(folder, requests) as ranks:
        command = ("-P", "-m", "rota.profiling.link_processes", folder.path)
        start(ranks, num_processes, command, folder, {"OMP_NUM_THREADS": "1", **device_environment(device)})
        try:
            ranks.wait()
        except RankFailed as error:
            raise PipelineError(f"a process that measured links failed: {error}; see above for its output") from None
        for line in Path(folder.path, _LINES).read_text().splitlines():
            report(line)
        return Cluster.from_json(Path(folder.path, _CLUSTER).read_text())


def main() -> None:
    """Run one of the processes that `links_of_started` starts."""
    end_with_parent(control.connect())
    torch.set_num_threads(1)
    (folder,) = sys.argv[1:]
    lines: list[str] = []
    if (cluster := links_of_launched(lines.append)) is not None:
        Path(folder, _LINES).write_text("\n".join(lines))
        Path(folder, _CLUSTER).write_text(cluster.to_json())


if __name__ == "__main__":
    main()
