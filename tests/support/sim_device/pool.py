"""A pool whose jobs run on simulated devices, so that tests written for the CPU run there unchanged."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from rota import Pipeline
from rota.runtime.messages import over_tensors
from support.moved import on_cpu, pipelines_on
from support.pool import LIMIT_S, Pool
from support.sim_device import SimDevice
from support.sim_device.groups import OPENING, syncs_inside_steps


class SimPool:
    """`run` as of `Pool`: stages are moved before their pipeline is made; results come back on the CPU.

    After each job it asserts that no rank's host has waited for its device inside a step, but for a pipeline's first,
    in which shapes are learned. `allowed`: parts of the texts of waits that the job itself brings about.
    """

    def __init__(self, pool: Pool, allowed: tuple[str, ...] = ()) -> None:
        self._pool, self._allowed = pool, allowed

    def run(self, num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = LIMIT_S) -> list[Any]:
        by_rank = self._pool.run(num_ranks, on_sim, function, *args, timeout_s=timeout_s)
        waits = [wait for _, waits in by_rank for wait in waits if not any(part in wait for part in self._allowed)]
        assert not waits, waits
        return [result for result, _ in by_rank]

    def renew(self) -> None:
        self._pool.renew()


def on_sim(rank: int, function: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    """What the function returns, on the CPU, and where the host has waited for its device inside steps."""
    waits: list[str] = []
    with SimDevice(f"rank {rank}").checked(), pipelines_on_sim(waits):
        return on_cpu(function(rank, *args)), waits


@contextmanager
def pipelines_on_sim(waits: list[str]) -> Iterator[None]:
    """Inside, pipelines move their stages and pinned batches to the current device; `waits` gets those in steps."""
    step = Pipeline.step

    def watched_step(pipeline: Pipeline, *args: Any, **options: Any) -> Any:
        is_first = pipeline.num_steps == 0
        syncs_inside_steps()
        result = step(pipeline, *over_tensors(_pinned, args), **options)
        found = syncs_inside_steps()
        waits.extend(wait for wait in found if OPENING in wait or not is_first)
        return result

    with patch.object(Pipeline, "step", watched_step), pipelines_on(torch.device("sim")):
        yield


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor


@contextmanager
def everywhere(original: Callable[..., Any], mutated: Callable[..., Any]) -> Iterator[None]:
    """Inside, all of Rota's modules have another function."""
    with ExitStack() as patches:
        for module in [module for name, module in sys.modules.items() if name.startswith("rota.")]:
            for name in [name for name, value in vars(module).items() if value is original]:
                patches.enter_context(patch.object(module, name, mutated))
        yield
