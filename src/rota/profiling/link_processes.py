"""Measures links between processes: new ones on this machine, see `link_rank.py`, or those that a launcher started."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from rota.cluster import Cluster
from rota.errors import PipelineError
from rota.profiling.host_links import MOST_SPREAD, REPEATS, Report
from rota.profiling.links import FoundLinks, find_links
from rota.runtime.device.local import AUTO, device_type, local_device
from rota.runtime.environment import device_environment
from rota.runtime.launching.launch import start
from rota.runtime.launching.rank_processes import RankFailed, Ranks
from rota.runtime.launching.requests import Requests
from rota.runtime.launching.run_folder import run_folder
from rota.runtime.process_group import join

_FOUND, _LINES = "found.json", "lines.txt"
_LOOK_S = 0.1


def is_launched() -> bool:
    """Whether torchrun, or something like it, has started this process as one of several."""
    return "RANK" in os.environ


def links_of_launched(
    repeats: int = REPEATS,
    most_spread: float = MOST_SPREAD,
    report: Report = lambda _: None,
    within_s: float = math.inf,
) -> FoundLinks | None:
    """The links of the launcher's processes, on the first of them; None on the others. See `find_links`.

    Messages are between the processes' `local_device`s.
    """
    owns = join()
    try:
        found = find_links(repeats, device=local_device(), most_spread=most_spread, report=report, within_s=within_s)
        return found if dist.get_rank() == 0 else None
    finally:
        if owns:
            dist.destroy_process_group()


def links_of_started(
    num_processes: int,
    device: str = AUTO,
    repeats: int = REPEATS,
    most_spread: float = MOST_SPREAD,
    report: Report = lambda _: None,
    within_s: float = math.inf,
) -> FoundLinks:
    """The links of `num_processes` new processes on this machine.

    Args:
        num_processes: 2 or more.
        device: What each one has: "cpu", the type of an accelerator, or "auto", as `local_device` takes it.
        repeats: As `find_links`.
        most_spread: As `find_links`.
        report: Called with a line for what is being measured, while it is.
        within_s: As `measure_hosts`.

    Raises:
        PipelineError: There are too few processes or devices, or one fails.
    """
    if num_processes < 2:
        raise PipelineError(f"num_processes is {num_processes}: a link needs 2")
    device_type(device, num_processes)
    with run_folder("rota-links-") as folder, Requests() as requests, Ranks(folder, requests) as ranks:
        how = json.dumps([repeats, most_spread, within_s])
        command = ("-P", "-m", "rota.profiling.link_rank", folder.path, how)
        start(ranks, num_processes, command, folder, {"OMP_NUM_THREADS": "1", **device_environment(device)})
        with _told(lines_file(folder.path), report):
            try:
                ranks.wait()
            except RankFailed as error:
                raise PipelineError(
                    f"a process that measured links failed: {error}; see above for its output"
                ) from None
        return _read(folder.path)


def lines_file(folder: str) -> Path:
    """Where the first process writes what it is measuring."""
    return Path(folder, _LINES)


@contextmanager
def _told(path: Path, report: Report) -> Iterator[None]:
    """Report each line that is added to the file meanwhile."""
    has_ended, num_told = threading.Event(), 0

    def tell() -> None:
        nonlocal num_told
        while True:
            is_last = has_ended.wait(_LOOK_S)
            lines = path.read_text().splitlines() if path.exists() else []
            for line in lines[num_told:]:
                report(line)
            num_told = len(lines)
            if is_last:
                return

    teller = threading.Thread(target=tell, name="rota-links", daemon=True)
    teller.start()
    try:
        yield
    finally:
        has_ended.set()
        teller.join()


def write_found(folder: str, found: FoundLinks) -> None:
    """Hand what was found to the process that started this one."""
    fields = found._asdict() | {"cluster": found.cluster.to_json(), "rehearsal": found.rehearsal.to_json()}
    Path(folder, _FOUND).write_text(json.dumps(fields))


def write_refusal(folder: str, refusal: str) -> None:
    """Tell the process that started this one why nothing was found."""
    Path(folder, _FOUND).write_text(json.dumps({"refusal": refusal}))


def _read(folder: str) -> FoundLinks:
    fields = json.loads(Path(folder, _FOUND).read_text())
    if "refusal" in fields:
        raise PipelineError(fields["refusal"])
    clusters = {name: Cluster.from_json(fields[name]) for name in ("cluster", "rehearsal")}
    return FoundLinks(**fields | clusters)
