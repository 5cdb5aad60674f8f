"""A standing pool of worker processes, so that a test pays for starting torch once a session."""

import copy
import faulthandler
import gc
import importlib
import inspect
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from functools import wraps
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any
from unittest.mock import patch

#: What most jobs import, so that fresh processes need not: it takes each of them longer than the job itself.
PRELOADED = [
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "rota.runtime.pipeline",
    "rota.models",
    "transformers.modeling_utils",
    "hypothesis",
    "pytest",
    "transformers.models.gpt2.modeling_gpt2",  # and with it most that other models of transformers import
]


#: For a job of seconds: the end of one that hangs, on a busy machine no end of one that does not.
LIMIT_S = 150.0


class WorkerFailed(AssertionError):
    """A worker raised, died or did not answer in time; the message holds its traceback or its last words."""


def forking_context() -> Any:
    """Processes forked from a server that has imported torch and more, so that this is paid for once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class Pool:
    """`run(n, function, *args)` calls `function(rank, *args)` on n processes that share a fresh group of a backend.

    `environment`: variables that the processes have in addition, where `context` spawns them.
    """

    def __init__(
        self, size: int, *, context: Any = None, environment: Mapping[str, str] | None = None, backend: str = "gloo"
    ) -> None:
        self._context = context or forking_context()
        self._size, self._environment, self._backend = size, environment or {}, backend
        self._workers: list[tuple[Any, Connection]] = []
        self._folder = Path(tempfile.mkdtemp(prefix="rota-pool-"))
        self._jobs = 0

    def run(self, num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = LIMIT_S) -> list[Any]:
        """The results by rank. After a failure the workers are replaced: their group may be broken."""
        while len(self._workers) < num_ranks:
            self._workers.append(self._start(len(self._workers)))
        self._jobs += 1
        store = self._folder / f"store{self._jobs}"
        workers = self._workers[:num_ranks]
        for rank, (_, pipe) in enumerate(workers):
            pipe.send((function, args, rank, num_ranks, store))
        try:
            return self._collect(workers, timeout_s)
        except BaseException:
            self.close()
            raise

    def renew(self) -> None:
        """New processes for the next job, before one that makes DTensors.

        What DTensor caches outlives a job, and names process groups by numbers that those of a later job have again.
        """
        self.close()

    def _collect(self, workers: list[tuple[Any, Connection]], timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = monotonic() + timeout_s
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(workers)}
        while len(results) < len(workers):
            ready = wait([pipe for pipe, rank in pipes.items() if rank not in results], deadline - monotonic())
            if not ready:
                for process, _ in workers:
                    os.kill(process.pid, signal.SIGUSR1)  # prints the stacks
                raise WorkerFailed(f"no answer after {timeout_s} s; ranks that finished: {sorted(results)}")
            for pipe in ready:
                try:
                    ok, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    workers[pipes[pipe]][0].join()
                    code = workers[pipes[pipe]][0].exitcode
                    raise WorkerFailed(f"rank {pipes[pipe]} ended with exit code {code}; see stderr") from None
                if not ok:
                    raise WorkerFailed(f"rank {pipes[pipe]}:\n{value}")
                results[pipes[pipe]] = value
        return [results[rank] for rank in range(len(workers))]

    def _start(self, number: int) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(theirs, self._backend), name=f"worker{number}", daemon=True)
        with patch.dict(os.environ, self._environment):
            process.start()
        theirs.close()
        return process, ours

    def close(self) -> None:
        for process, pipe in self._workers:
            process.kill()
            process.join()
            pipe.close()
        self._workers.clear()

    def remove(self) -> None:
        """End the workers, and leave no file behind."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def on_ranks(num_ranks: int, *, renewed: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of what is asserted on each of so many processes of the pool.

    The function's first parameter is the rank; its others are parameters and fixtures, which are sent to the processes.
    `renewed`: new processes, for a test that makes DTensors.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def test(pool: Pool, **given: Any) -> None:
            if renewed:
                pool.renew()
            pool.run(num_ranks, _call, function.__module__, function.__name__, given)

        rank, *others = inspect.signature(function).parameters.values()
        test.__signature__ = inspect.Signature([rank.replace(name="pool"), *others])  # type: ignore[attr-defined]
        return test

    return decorate


def _call(rank: int, module: str, name: str, given: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(rank, **given)


def _work(pipe: Connection, backend: str) -> None:
    gc.freeze()  # a search for cycles in what is preloaded would find none, and copy the pages that processes share
    faulthandler.register(signal.SIGUSR1)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if "ROTA_SIM_DEVICE" in os.environ:
        import support.sim_device.groups  # noqa: F401 - before the first backward, see tests/sim_device/conftest.py
    while True:
        try:
            function, args, rank, num_ranks, store = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=num_ranks)
            # Tensors come in memory that all workers and the test share: each gets its own, as on other machines.
            result = function(rank, *copy.deepcopy(args))
            dist.destroy_process_group()
            pipe.send((True, result))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
            sys.stderr.flush()
