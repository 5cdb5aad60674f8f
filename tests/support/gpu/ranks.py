"""Ranks on accelerators: standing processes, each on a device of its own, or together on those that there are."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from support.fresh import Ended, run_fresh
from support.pool import LIMIT_S, Pool


class Place(NamedTuple):
    """`number` devices of a type, whose tensors go between ranks by `backend`; what the processes need in addition."""

    kind: str
    number: int
    backend: str
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def variables(self) -> dict[str, str]:
        of_kind = {"cpu": {"ROTA_DEVICE": "cpu"}, "sim": {"ROTA_SIM_DEVICE": "1"}}
        return of_kind.get(self.kind, {}) | dict(self.environment)


def ways_to_share(place: Place, nccl: tuple[int, ...]) -> list[Place]:
    """How more ranks than devices may exchange tensors, the best way first. `nccl`: its version.

    NCCL 2.30 lets ranks share a device, as an experiment; they have no room for many CTAs, nor for its multicast.
    """
    by_gloo = place._replace(backend="gloo")
    if place.backend != "nccl":
        return [place] if place.kind in ("cpu", "sim") else [by_gloo]
    variables = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0"}
    by_nccl = place._replace(environment=(*place.environment, *variables.items()))
    return [by_nccl, by_gloo] if nccl >= (2, 30) else [by_gloo]


class Ranks:
    """`ranks(number, job, *args)`: what `job(rank, device, *args)` returns on each rank, in processes that stay.

    `run` is as of `support.pool.Pool`, for tests that were written for the CPU: all stages and batches are moved.
    """

    def __init__(self, place: Place, shared: Place | None, pools: dict[Place, Pool]) -> None:
        """`shared`: for more ranks than devices; None: the test is skipped. `pools`: those of all tests."""
        self._place, self._shared, self._pools = place, shared, pools
        self.environment: dict[str, str] = {}

    def place_of(self, num_ranks: int) -> Place:
        """Where so many ranks run."""
        place = self._place if num_ranks <= self._place.number else self._shared
        if place is None:
            pytest.skip(f"needs {num_ranks} devices, and ranks cannot share those here")
        return place._replace(environment=(*place.environment, *self.environment.items()))

    def __call__(self, num_ranks: int, job: Callable[..., Any], *args: Any, timeout_s: float = LIMIT_S) -> Any:
        place = self.place_of(num_ranks)
        if place not in self._pools:
            backend = "gloo" if place.backend == "gloo" else f"cpu:gloo,{place.kind}:{place.backend}"
            context = multiprocessing.get_context("spawn")  # a forked process cannot use a device
            self._pools[place] = Pool(4, context=context, environment=place.variables, backend=backend)
        return self._pools[place].run(num_ranks, on_device, place, job, *args, timeout_s=timeout_s)

    def run(self, num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = LIMIT_S) -> Any:
        return self(num_ranks, moved, function, *args, timeout_s=timeout_s)

    def renew(self) -> None:
        """New processes for what follows."""
        for place in self._pools.keys() & {self._place, self._shared}:
            self._pools[place].renew()


def run_doomed(folder: Path, place: Place, num_ranks: int, job: Callable[..., Any], *args: Any) -> list[Ended]:
    """How new processes end, of which some are killed."""
    context = multiprocessing.get_context("spawn")
    with patch.dict(os.environ, place.variables):
        return run_fresh(folder, num_ranks, on_device, place, job, *args, timeout_s=LIMIT_S + 90, context=context)


def on_device(rank: int, place: Place, job: Callable[..., Any], *args: Any) -> Any:
    """What the job returns on this rank's device."""
    import torch
    import torch.distributed as dist

    from rota.runtime.device import choosing

    with ExitStack() as contexts:
        device = torch.device("cpu")
        if place.kind == "sim":
            from support.sim_device import SimDevice
            from support.sim_device.groups import SIM as device

            contexts.enter_context(SimDevice(f"rank {rank}").checked())
        elif place.kind != "cpu":
            device = torch.device(place.kind, rank % place.number)
            torch.accelerator.set_device_index(device)
            dist.Backend.default_device_backend_map[place.kind] = place.backend
        if dist.get_world_size() > place.number:  # refused otherwise, and rightly so
            contexts.enter_context(patch.object(choosing, "_unit_of", lambda _: ""))
        return job(rank, device, *args)


#: Where a test may wait in a step on a simulated device: a tied gradient that was changed between two steps of a round
#: may have been zeroed; a stage's own group opens in the first step, which goes in the strict order; parts of a pinned
#: batch are not pinned; and stages ask which micro-batch they have.
MAY_WAIT = ("shared_weights.py", "runtime/spmd.py", "microbatch_inputs.py", "test_unused_outputs.py")


def moved(rank: int, device: Any, function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns, on the CPU, if pipelines move their stages and batches to `device`."""
    from support.moved import on_cpu, pipelines_on

    if device.type != "sim":
        with pipelines_on(device):
            return on_cpu(function(rank, *args))
    from support.sim_device.pool import pipelines_on_sim

    waits: list[str] = []
    with pipelines_on_sim(waits):
        result = on_cpu(function(rank, *args))
    assert not [wait for wait in waits if not any(part in wait for part in MAY_WAIT)], waits
    return result
