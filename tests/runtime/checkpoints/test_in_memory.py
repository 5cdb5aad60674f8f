"""What `commit` keeps in memory, and what a rank goes on from: the steps of the undisturbed run, to the bit."""

import errno
import math
import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch

from rota import Checkpoints, PipelineError, simulate, split
from rota.runtime.checkpoints import Checkpoint, snapshots
from rota.runtime.checkpoints.tensors import chunks_of
from rota.runtime.environment import PROGRESS
from rota.runtime.launcher_files import states_in
from support.checkpoint_runs import TWO, Training, memory, model, steps_in
from support.networks import refusal
from support.pool import on_ranks


def commit_steps(training: Training, kept: Checkpoints, steps: range) -> None:
    for step in steps:
        training.steps(range(step, step + 1))
        kept.commit(step + 1, data=[step])


@contextmanager
def trained(folder: Path, num_committed: int = 0) -> Iterator[tuple[Training, Checkpoints]]:
    """A training from its beginning, as a script does it that does not load."""
    with Training(TWO) as training:
        kept = training.checkpoints(folder)
        commit_steps(training, kept, range(num_committed))
        yield training, kept


@contextmanager
def resumed(folder: Path) -> Iterator[tuple[Training, Checkpoint]]:
    """A training with other weights that has loaded."""
    with Training(TWO, split(model(1), TWO.plan().num_stages)) as training:
        found = training.checkpoints(folder).load()
        yield training, found


@on_ranks(2)
def test_the_newest_step_is_restored(rank: int, tmp_path: Path) -> None:
    with memory() as file, pytest.MonkeyPatch.context() as patch, redirect_stderr(StringIO()) as told:
        patch.setenv(PROGRESS, "1")
        with trained(tmp_path, 3) as (first, _):
            assert sorted(steps_in(file)) == [2, 3]
            expected, random_after = first.steps(range(3, 6)), torch.rand(3)
            lines = [line for line in told.getvalue().splitlines() if line.startswith("rota: states are kept")]
            assert len(lines) == (rank == 0)
            if first.pipeline.progress is not None:
                assert len(first.pipeline.progress._commits_s) == 3
                assert first.pipeline.progress._snapshot_bytes > 0
        with resumed(tmp_path) as (again, found):
            assert (found.step, found.extra, found.path) == (3, {"data": [2]}, None)
            assert steps_in(file) == [3]
            assert again.steps(range(3, 6)) == expected
            assert torch.equal(torch.rand(3), random_after)
        assert told.getvalue().count("rota: training resumes from step 3 in memory\n") == (rank == 0)


@on_ranks(2)
def test_the_newest_step_since_going_back_is_restored(rank: int, tmp_path: Path) -> None:
    with memory() as file:
        with trained(tmp_path, 2) as (first, kept):
            kept.save(2)
            commit_steps(first, kept, range(2, 4))
            kept.save(4)
            first.steps(range(4, 5))
            with pytest.raises(PipelineError, match=r"commit\(4\) after commit\(4\) and more steps"):
                kept.commit(4)
            found = kept.load(2)
            assert found.step == 2
            assert steps_in(file) == []  # a restart may not lead back to step 4
            commit_steps(first, kept, range(2, 3))
            assert steps_in(file) == [3]
            expected = first.steps(range(3, 6))
        with resumed(tmp_path) as (again, found):  # and not from the checkpoint of step 4, from which it has gone back
            assert (found.step, found.path) == (3, None)
            assert again.steps(range(3, 6)) == expected


@on_ranks(2)
def test_the_newest_step_that_all_ranks_have_is_restored(rank: int, tmp_path: Path) -> None:
    """Rank 0 has committed the step in which rank 1 was killed."""
    with memory() as file:
        with trained(tmp_path, 2) as (first, kept):
            first.steps(range(2, 3))
            if rank == 0:
                kept.commit(3)
        with resumed(tmp_path) as (_, found):
            assert found.step == 2
            assert steps_in(file) == [2]


@on_ranks(2)
def test_a_later_checkpoint_is_restored(rank: int, tmp_path: Path) -> None:
    with memory() as file:
        with trained(tmp_path, 1) as (first, kept):
            first.steps(range(1, 3))
            kept.save(3)
        with resumed(tmp_path) as (_, found):
            assert (found.step, found.path) == (3, tmp_path / "step-3")
            assert steps_in(file) == []


@on_ranks(2)
def test_no_step_of_before_is_restored_if_the_script_does_not_load(rank: int, tmp_path: Path) -> None:
    with memory() as file:
        for last in (3, 1):
            with trained(tmp_path, last):
                pass
        assert steps_in(file) == [1]  # and not 3, which the script has not gone on from


@on_ranks(2)
def test_any_values_of_a_script_is_restored(rank: int, tmp_path: Path) -> None:
    given = {"best": torch.tensor(math.nan), "mean": np.float64(0.5), "seen": OrderedDict(a=True)}
    given["small"] = torch.ones(2).to(torch.float8_e4m3fn)
    with memory():
        with trained(tmp_path) as (first, kept):
            first.steps(range(1))
            kept.commit(1, **given)
        with resumed(tmp_path) as (_, found):
            extra = found.extra
    assert found.path is None
    assert math.isnan(extra["best"])
    assert (extra["mean"], extra["seen"]) == (0.5, {"a": True})
    assert extra["small"].float().tolist() == [1, 1]


@on_ranks(2)
def test_a_training_does_not_go_on_from_the_state_of_another(rank: int, tmp_path: Path) -> None:
    with memory() as file:
        names = []
        for name in ("first", "second"):
            with trained(tmp_path / name, 3):
                pass
            assert sorted(steps_in(file)) == [2, 3]
            names += {name for name, _ in states_in(file)}
        assert len({*names}) == len(names) == 2  # the launcher counts the steps of each
        first, second = (Training(TWO) for _ in range(2))  # as after a restart, which begins with the first one
        with first.pipeline, second.pipeline:
            assert first.checkpoints(tmp_path / "first").load() is None
            found = second.checkpoints(tmp_path / "second").load()
            assert found.step == 3


@on_ranks(2)
def test_two_trainings_do_not_share_the_memory(rank: int, tmp_path: Path) -> None:
    with memory() as file, trained(tmp_path / "one") as (_, kept), trained(tmp_path / "other") as (_, others):
        kept.commit(1)
        others.commit(1)
        assert steps_in(file) == [1]
        told = refusal(lambda: kept.commit(2))
        others.commit(2)
        assert sorted(steps_in(file)) == [1, 2]
        assert told.startswith(f"commit for {tmp_path}/one after one for {tmp_path}/other: the memory has room")


@on_ranks(2)
def test_what_commit_refuses(rank: int, tmp_path: Path) -> None:
    with memory() as file, trained(tmp_path) as (training, kept):
        training.steps(range(1))
        weight = next(training.pipeline.parameters())
        for gradient in (torch.ones_like(weight), torch.zeros_like(weight)):
            weight.grad = gradient
            assert "has a gradient" in refusal(lambda: kept.commit(1))
        weight.grad = None
        buffer = next(weight.tensor for weight, _ in kept._trained.weights.local() if weight.is_buffer)
        buffer.requires_grad_().grad = torch.ones_like(buffer)  # no optimizer has it, so no restart misses it
        kept.commit(1)
        assert "step=-1" in refusal(lambda: kept.commit(-1))
        assert "extra['data'] is a object" in refusal(lambda: kept.commit(2, data=object()))
        assert steps_in(file) == [1]


def memory_of(kept: Checkpoints) -> snapshots.Snapshots:
    return kept._commits.snapshots


def bytes_of_two(kept: Checkpoints) -> tuple[int, int]:
    """What two states need, and their tensors alone."""
    tensors, _ = kept._trained.collect(0, {}, 0)
    num_bytes = 2 * sum(chunk.num_bytes for chunk in chunks_of(tensors))
    return num_bytes + 4 * snapshots._HEAD_BYTES, num_bytes


@pytest.mark.parametrize("what", ["machine", "plan", "folder"])
@on_ranks(2)
def test_without_enough_memory_nothing_is_kept(rank: int, tmp_path: Path, what: str) -> None:
    with memory() as file, pytest.MonkeyPatch.context() as patch, trained(tmp_path) as (training, kept):
        if what == "machine" and rank == 1:
            patch.setattr(snapshots, "available_bytes", lambda: 1000)
        if what == "folder":
            patch.setattr(snapshots.Snapshots, "disk_bytes", 64_000)
        if what == "plan":
            plan = training.pipeline.plan
            cluster = replace(plan.placement.cluster, limit_bytes=(1000, 1000))
            training.pipeline.plan = replace(plan, placement=replace(plan.placement, cluster=cluster))
        with redirect_stderr(StringIO()) as told:
            commit_steps(training, kept, range(2))
        assert steps_in(file) == []
        if what == "folder" and rank == 0:
            assert "and /dev/shm has 64 kB: enlarge it, or name another tmpfs" in told.getvalue()


@on_ranks(2)
def test_a_plan_that_counts_states_in_memory_has_room_for_them(rank: int, tmp_path: Path) -> None:
    """The optimizer's state is not counted by this plan, so there is room for the weights' alone."""
    with memory() as file, trained(tmp_path) as (training, kept):
        plan, (_, counted) = training.pipeline.plan, bytes_of_two(kept)
        placement = replace(plan.placement, static_bytes=(counted,) * 2, snapshot_bytes=(counted,) * 2)
        most = max(simulate(replace(plan, placement=placement)).peak_memory_bytes)
        cluster = replace(placement.cluster, limit_bytes=(most, most))
        training.pipeline.plan = replace(plan, placement=replace(placement, cluster=cluster))
        kept.commit(0)
        assert steps_in(file) == [0]
        commit_steps(training, kept, range(1))
        assert steps_in(file) == []


@on_ranks(2)
def test_a_restart_needs_no_more_memory_than_it_has_already(rank: int, tmp_path: Path) -> None:
    with memory() as file, pytest.MonkeyPatch.context() as patch:
        with trained(tmp_path, 2):
            pass
        with Training(TWO, split(model(1), TWO.plan().num_stages)) as again:
            kept = again.checkpoints(tmp_path)
            kept.load()
            states = memory_of(kept)
            missing = 2 * (bytes_of_two(kept)[0] - states.allocated_bytes)
            patch.setattr(snapshots, "available_bytes", lambda: missing)
            kept.commit(3)
            assert sorted(steps_in(file)) == [2, 3]


@on_ranks(2)
def test_states_that_have_grown_too_large_are_no_longer_kept(rank: int, tmp_path: Path) -> None:
    with memory() as file, pytest.MonkeyPatch.context() as patch, trained(tmp_path) as (training, kept):
        states, needed = memory_of(kept), 2 * bytes_of_two(kept)[0]
        # Together, both ranks have enough for their weights, but not for an optimizer's state as well.
        patch.setattr(snapshots, "available_bytes", lambda: needed)
        kept.commit(0)
        assert steps_in(file) == [0]
        patch.setattr(snapshots, "available_bytes", lambda: needed - 2 * states.allocated_bytes)
        commit_steps(training, kept, range(2))
        assert steps_in(file) == []
        assert states.allocated_bytes == 0  # what the first state took is free again


@on_ranks(2)
def test_a_rank_without_memory_for_more_ends_no_run(rank: int, tmp_path: Path) -> None:
    def no_memory(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with memory() as file, pytest.MonkeyPatch.context() as patch, trained(tmp_path) as (training, kept):
        patch.setattr(snapshots, "_HEAD_BYTES", 64)  # else there is enough to spare
        kept.commit(0)
        kept.commit(1)
        if rank == 1:
            patch.setattr(os, "posix_fallocate", no_memory)
        training.steps(range(1))
        kept.commit(2)
        assert sorted(steps_in(file)) == ([] if rank == 1 else [1, 2])
        training.steps(range(1, 2))
        kept.commit(3)  # the fourth: all count again
        assert steps_in(file) == []
