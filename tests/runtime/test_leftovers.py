"""A closed pipeline leaves nothing behind, and a running one does not grow."""

import os
import signal
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import rota
from rota import LostRankError, Pipeline, PipelineError, Plan, Stages
from rota.runtime import engine, pipeline as pipeline_module
from support.fresh import run_fresh
from support.networks import Layer, batch_of, chain, loss_fn, plan_for, refusal
from support.pool import Pool, on_ranks

NUM_RANKS = 3
NUM_STEPS = int(os.environ.get("ROTA_SOAK_STEPS", "100"))
PLAN = plan_for(NUM_RANKS)


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


def grown(early: dict[str, int], late: dict[str, int], rounds: int) -> dict[str, int]:
    """What there is more of, if it is more than a library may have started meanwhile."""
    assert rounds > _OTHERS
    return {name: late[name] - early[name] for name in early if late[name] - early[name] > _OTHERS}


_OTHERS = 3
NUM_PIPELINES = 12


@on_ranks(4)
def test_pipelines_made_one_after_another_leave_nothing(rank: int) -> None:
    """Of two replicas: what is held after the second pipeline, and after the last."""
    stages, plan, batch, counts = chain(2), plan_for(2), batch_of(8), []
    mesh = rota.mesh(pp=2, dp=2)
    for _ in range(NUM_PIPELINES):
        with Pipeline(stages, plan, loss_fn, mesh=mesh, check_data="never") as pipeline:
            pipeline.step(*batch)
        torch.distributed.barrier()
        counts.append(held())
        del counts[-1]["bytes"]
    assert not grown(counts[1], counts[-1], NUM_PIPELINES - 2), counts


def many_steps(rank: int, stages: Stages, plan: Plan, batch: Any) -> tuple[dict[str, int], dict[str, int]]:
    with Pipeline(stages, plan, loss_fn) as pipeline:
        for step in range(NUM_STEPS):
            pipeline.step(*batch)
            if step == 20:
                early = held()
        return early, held()


def test_many_steps_in_a_row_stay_flat(pool: Pool) -> None:
    """A boundary tensor has 100 kB, so that 80 steps would leave 30 MB if each left one micro-batch's."""
    width = 128
    stages = Stages([Layer(width).double() for _ in range(NUM_RANKS)])
    batch = torch.randn(2, 400, width, dtype=torch.float64).unbind()
    for early, late in pool.run(NUM_RANKS, many_steps, stages, PLAN, batch, timeout_s=150 + NUM_STEPS / 2):
        assert late.pop("bytes") < early.pop("bytes") + 20e6
        assert not grown(early, late, NUM_STEPS - 20), (early, late)


@on_ranks(2)
def test_closed_pipeline_says_so(rank: int) -> None:
    pipeline = Pipeline(chain(2), plan_for(2), loss_fn)
    pipeline.close()
    calls = (pipeline.step, pipeline.evaluate, pipeline.forward, lambda: pipeline.clip_grad_norm_(1.0))
    assert [refusal(call) for call in calls] == ["the pipeline is closed; make a new one"] * 4


def groups() -> int:
    return len(torch.distributed.distributed_c10d._world.pg_names)


def fail(*_: Any, **__: Any) -> Any:
    raise OSError("no space left on device")


@on_ranks(NUM_RANKS)
def test_a_pipeline_that_cannot_be_made_leaves_nothing(rank: int) -> None:
    """Whose making fails on all ranks, early or late."""
    stages = chain(NUM_RANKS)
    for name in ("Processes", "ReadyPlans"):
        threads, before = rotas_threads(), groups()
        # A rank that is still connecting may notice first that another one has failed.
        with patch.object(engine, name, fail), pytest.raises((OSError, LostRankError)):
            Pipeline(stages, PLAN, loss_fn)
        assert not rotas_threads() - threads, name
        assert groups() == before, name
        torch.distributed.barrier()
    with Pipeline(stages, PLAN, loss_fn) as pipeline:
        pipeline.step(*batch_of(4))


def make_without_processes(rank: int, stages: Stages, plan: Plan) -> None:
    """As where `join` has made the process group."""
    with (
        patch.object(engine, "join", lambda *_: True),
        patch.object(engine, "ReadyPlans", fail),
        pytest.raises(OSError, match="no space left"),
    ):
        Pipeline(stages, plan, loss_fn)
    assert not torch.distributed.is_initialized()


@pytest.mark.dist
def test_a_pipeline_that_cannot_be_made_leaves_its_processes(tmp_path: Path) -> None:
    ended = run_fresh(tmp_path, 2, make_without_processes, chain(2), plan_for(2))
    assert [each.exit_code for each in ended] == [0, 0], ended


@on_ranks(NUM_RANKS)
def test_what_fails_in_close_keeps_nothing_else_open(rank: int) -> None:
    """One end fails, Rota's own or one that the user has added: the others come all the same."""
    for is_own, told in (
        (True, "PipelineError: the last step's record for `rota run --timeline` was not written"),
        (False, "OSError: no space left on device"),
    ):
        threads, before, ended = rotas_threads(), groups(), []
        with patch.object(pipeline_module, "leave_record", fail) if is_own else nullcontext():
            pipeline = Pipeline(chain(NUM_RANKS), PLAN, loss_fn)
            pipeline.before_close.callback(ended.append, "checkpoint")
            if not is_own:
                pipeline.before_close.callback(fail)
            assert not pipeline.should_stop  # from now on it handles signals
            pipeline.step(*batch_of(4))
            with pytest.raises((PipelineError, OSError)) as error:
                pipeline.close()
        assert f"{type(error.value).__name__}: {error.value}".startswith(told)
        assert ended == ["checkpoint"]
        assert not rotas_threads() - threads
        assert groups() == before
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        pipeline.close()  # once more does nothing
        torch.distributed.barrier()


def divide_by_zero(stages: Stages, plan: Plan) -> None:
    with Pipeline(stages, plan, loss_fn) as pipeline:
        pipeline.step(*batch_of(4))
        raise ZeroDivisionError("the script's own")


@on_ranks(NUM_RANKS)
def test_the_first_error_is_told(rank: int) -> None:
    """The script's own error is the one to be told, and not what fails because of it."""
    with patch.object(pipeline_module, "leave_record", fail), pytest.raises(ZeroDivisionError, match="the script's"):
        divide_by_zero(chain(NUM_RANKS), PLAN)
