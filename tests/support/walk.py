"""How many files a reader opens to follow one request: the functions of Rota that it really runs, by file.

    PYTHONPATH=tests python -m support.walk step      one training step of rank 1 of 2, after a first one
    PYTHONPATH=tests python -m support.walk search    rota plan search

`depth` is the longest chain of Rota's functions that call each other. These are numbers to watch, not limits.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import rota

PACKAGE = f"{Path(rota.__file__).parent}/"


class Walk:
    """The functions called while `recording`, by file in the order of their first call, and the deepest chain."""

    def __init__(self) -> None:
        self.functions_by_file: dict[str, list[str]] = {}
        self.depth = 0
        self._now: list[FrameType] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED and code.co_name[0] != "<"  # no module or class body
        if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE) or not is_function:
            return
        if event == "return":
            if self._now and self._now[-1] is frame:
                self._now.pop()
            return
        self._now.append(frame)
        self.depth = max(self.depth, len(self._now))
        functions = self.functions_by_file.setdefault(code.co_filename.removeprefix(PACKAGE), [])
        if code.co_qualname not in functions:
            functions.append(code.co_qualname)

    def to_text(self) -> str:
        lines = [f"{len(self.functions_by_file)} files, depth {self.depth}"]
        lines += [f"  {file}: {', '.join(functions)}" for file, functions in self.functions_by_file.items()]
        return "\n".join(lines)


def walk_step() -> Walk:
    """The second training step of rank 1 of 2, under 1F1B with 4 micro-batches."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(2) as pool:
        walks = pool.starmap(_walk_step_on, [(rank, f"{folder}/store") for rank in range(2)], chunksize=1)
    walk = Walk()
    walk.functions_by_file, walk.depth = walks[1]
    return walk


def _walk_step_on(rank: int, store: str) -> tuple[dict[str, list[str]], int]:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist
    from torch import nn

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    plan = rota.schedules.one_f_one_b(rota.place(rota.Costs.uniform(2), rota.Cluster.uniform(2)), 4)
    stages = rota.split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2)
    walk = Walk()
    with rota.Pipeline(stages, plan, nn.functional.mse_loss) as pipeline:
        batch = torch.ones(8, 4), torch.ones(8, 4)
        pipeline.step(*batch)
        with walk.recording():
            pipeline.step(*batch)
    dist.destroy_process_group()
    return walk.functions_by_file, walk.depth


def walk_search() -> Walk:
    """`rota plan search` on uneven stages with a memory limit and transfers, for five seconds."""
    from rota.cli import main

    walk = Walk()
    costs = rota.Costs.uniform(4, forward_us=1000, backward_us=2000, boundary_bytes=100)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        Path(folder, "costs.json").write_text(costs.to_json())
        command = f"plan search --costs {folder}/costs.json --microbatches 12 --limit 500B --link 40us"
        with walk.recording(), contextlib.suppress(SystemExit):
            main([*command.split(), "--time-limit", "5", "-o", f"{folder}/plan.json"])
    return walk


WALKS: dict[str, Callable[[], Walk]] = {"step": walk_step, "search": walk_search}

if __name__ == "__main__":
    for name in sys.argv[1:] or WALKS:
        print(f"{name}: {WALKS[name]().to_text()}")
