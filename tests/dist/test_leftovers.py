"""A closed pipeline leaves nothing behind, and a running one does not grow."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import rota
from dist.networks import Layer, batch_of, chain, graph_of_layers, loss_fn
from dist.pool import Pool
from dist.test_shared_weights import STREAMS
from rota import Cluster, Costs, Pipeline, Plan, Stages, place, schedules

NUM_RANKS = 3
NUM_STEPS = int(os.environ.get("ROTA_SOAK_STEPS", "200"))


def plan_for(num_microbatches: int = 4) -> Plan:
    return schedules.one_f_one_b(place(Costs.uniform(NUM_RANKS), Cluster.uniform(NUM_RANKS)), num_microbatches)


def held() -> dict[str, int]:
    """What this process holds now.

    Libraries that an earlier test used in this process start and end threads of their own when they like (the compiler
    has a timer, for one), so that one more or less says nothing: what each round leaves shows after many rounds.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "processes": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
        "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def rotas_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("rota")}


def threads_in_and_after(rank: int, stages: Stages, plan: Plan, batch: Any) -> tuple[set[str], set[str]]:
    """Names of the threads that a pipeline starts, and of those that are left when it is closed.

    An earlier test may have left a pipeline to the garbage collector: its threads are not counted.
    """
    before = rotas_threads()
    with Pipeline(stages, plan, loss_fn) as pipeline:
        pipeline.step(*batch)
        started = rotas_threads() - before
    pipeline.close()  # once more does nothing
    return {thread.name for thread in started}, {thread.name for thread in rotas_threads() & started}


def test_close_ends_the_threads(pool: Pool) -> None:
    seen = pool.run(NUM_RANKS, threads_in_and_after, chain(NUM_RANKS), plan_for(), batch_of(4))
    assert seen == [({"rota-sends", "rota-watchdog", "rota-roll-call"}, set())] * NUM_RANKS


def grown(early: dict[str, int], late: dict[str, int], rounds: int) -> dict[str, int]:
    """What there is more of, if it is more than a library may have started meanwhile."""
    assert rounds > _OTHERS
    return {name: late[name] - early[name] for name in early if late[name] - early[name] > _OTHERS}


_OTHERS = 3
NUM_PIPELINES = 12


def many_pipelines(rank: int, stages: Stages, plan: Plan, batch: Any, mesh: dict[str, int]) -> list[dict[str, int]]:
    """What is held after the second pipeline and after the last."""
    counts = []
    by_name = rota.mesh(**mesh) if mesh else None
    for _ in range(NUM_PIPELINES):
        with Pipeline(stages, plan, loss_fn, mesh=by_name) as pipeline:
            pipeline.step(*batch)
        torch.distributed.barrier()
        counts.append(held())
        del counts[-1]["bytes"]
    return [counts[1], counts[-1]]


@pytest.mark.parametrize("case", ["alone", "two replicas", "shared weights"])
def test_pipelines_made_one_after_another_leave_nothing(pool: Pool, case: str) -> None:
    stages, plan, mesh = chain(NUM_RANKS), plan_for(), {}
    if case == "two replicas":
        stages, plan, mesh = chain(2), schedules.one_f_one_b(two_ranks(), 4), {"pp": 2, "dp": 2}
    elif case == "shared weights":
        stages, plan = chain(4), STREAMS["chimera on 4"]
    num_ranks = plan.placement.num_ranks * mesh.get("dp", 1)
    for early, late in pool.run(num_ranks, many_pipelines, stages, plan, batch_of(8), mesh):
        assert not grown(early, late, NUM_PIPELINES - 2), (early, late)


def many_steps(rank: int, stages: Stages, plan: Plan, batch: Any) -> tuple[dict[str, int], dict[str, int]]:
    with Pipeline(stages, plan, loss_fn) as pipeline:
        for step in range(NUM_STEPS):
            pipeline.step(*batch)
            if step == 20:
                early = held()
        return early, held()


def test_many_steps_in_a_row_stay_flat(pool: Pool) -> None:
    """A boundary tensor has 100 kB, so that 180 steps would leave 70 MB if each left one micro-batch's."""
    width = 128
    stages = Stages([Layer(width).double() for _ in range(NUM_RANKS)])
    batch = torch.randn(2, 400, width, dtype=torch.float64).unbind()
    for early, late in pool.run(NUM_RANKS, many_steps, stages, plan_for(), batch, timeout_s=NUM_STEPS / 2):
        assert late.pop("bytes") < early.pop("bytes") + 20e6
        assert not grown(early, late, NUM_STEPS - 20), (early, late)


def use_after_close(rank: int, stages: Stages, plan: Plan) -> str:
    pipeline = Pipeline(stages, plan, loss_fn)
    pipeline.close()
    try:
        pipeline.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was said"


def test_closed_pipeline_says_so(pool: Pool) -> None:
    told = pool.run(2, use_after_close, graph_of_layers(2, [(0, 1)]), schedules.gpipe(two_ranks(), 2))
    assert told == ["PipelineError: the pipeline is closed; make a new one"] * 2


def two_ranks() -> Any:
    return place(Costs.uniform(2), Cluster.uniform(2))
