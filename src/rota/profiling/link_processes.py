"""Links between processes that are started for it, on this machine; or between those that a launcher has started."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn

from rota.costs import Cluster
from rota.errors import PipelineError
from rota.profiling.links import measure_links
from rota.runtime.joining import join


def is_launched() -> bool:
    """Whether torchrun, or something like it, has started this process as one of several."""
    return "RANK" in os.environ


def links_of_launched() -> Cluster | None:
    """Of the launcher's processes, on the first of them; None on the others."""
    owns = join()
    try:
        cluster = measure_links()
        return cluster if dist.get_rank() == 0 else None
    finally:
        if owns:
            dist.destroy_process_group()


def links_of_started(num_processes: int) -> Cluster:
    """Of `num_processes` on this machine, by Gloo. Raises PipelineError."""
    if num_processes < 2:
        raise PipelineError(f"num_processes is {num_processes}: a link needs 2")
    with tempfile.TemporaryDirectory(prefix="rota-links-") as folder:
        try:
            spawn(_work, (num_processes, folder), nprocs=num_processes, daemon=True)  # type: ignore[no-untyped-call]
        except ProcessException as error:
            raise PipelineError(f"a process that measured links failed: {error}") from None
        return Cluster.from_json(Path(folder, "cluster.json").read_text())


def _work(rank: int, num_processes: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_processes)
    cluster = measure_links()
    if rank == 0:
        Path(folder, "cluster.json").write_text(cluster.to_json())
    dist.destroy_process_group()
