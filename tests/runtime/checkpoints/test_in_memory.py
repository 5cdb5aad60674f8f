"""What `commit` keeps in memory, and what a rank goes on from: the steps of the undisturbed run, to the bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rota import PipelineError, split
from rota.runtime import checkpoints, kept_memory
from rota.runtime.checkpoints import in_memory
from rota.runtime.kept_memory import KeptMemories, Slots, steps_in
from support.checkpoint_runs import TWO, Training, model
from support.pool import Pool

pytestmark = pytest.mark.dist


@contextmanager
def memory() -> Iterator[int]:
    """A memory as a supervisor would keep it for this rank, and no other rank's."""
    with KeptMemories(1) as kept, pytest.MonkeyPatch.context() as patch:
        for name, value in kept_memory.environment_of(kept.files).items():
            patch.setenv(name, value)
        yield kept.files[0]


def go_on(rank: int, folder: Path) -> None:
    with memory() as file:
        first = Training(TWO)
        with first.pipeline:
            kept = first.checkpoints(folder)
            assert kept.load() is None
            for step in range(3):
                first.steps(range(step, step + 1))
                kept.commit(step + 1, data=[step])
            assert sorted(steps_in(file)) == [2, 3]
            expected, random_after = first.steps(range(3, 6)), torch.rand(3)

        again = Training(TWO, split(model(1), TWO.plan().num_stages))
        with again.pipeline:
            found = again.checkpoints(folder).load()
            assert found is not None
            assert (found.step, found.extra, found.path) == (3, {"data": [2]}, None)
            assert steps_in(file) == [3]
            assert again.steps(range(3, 6)) == expected
            assert torch.equal(torch.rand(3), random_after)


def test_the_newest_step_in_memory_is_restored(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, go_on, tmp_path)


# --- tensors in use ---------------------------------------------------------------------------------------------------


@contextmanager
def small_ones_count() -> Iterator[None]:
    """The optimizer's tensors lie in the memory, however small they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_memory, "_LARGE_BYTES", 9)  # more than a number of steps has
        patch.setattr(in_memory, "_taken", set())
        yield


def begin_again(folder: Path, expected_step: int, *, in_new_process: bool = True) -> Training:
    if in_new_process:
        in_memory._taken.clear()
    again = Training(TWO, split(model(1), TWO.plan().num_stages))
    found = again.checkpoints(folder).load()
    assert found is not None
    assert found.step == expected_step
    return again


@contextmanager
def killed(training: Training, file: int) -> Iterator[None]:
    """At the end of the context the training leaves its memory as it is then."""
    with training.pipeline:
        yield
        image = os.pread(file, os.fstat(file).st_size, 0)
    os.pwrite(file, image, 0)


def go_on_from_tensors_in_use(rank: int, folder: Path) -> None:
    """From a kill while the step after a commit runs, while the optimizer does, and after that again."""
    with memory() as file, small_ones_count():
        whole = Training(TWO)
        with whole.pipeline:
            expected = whole.steps(range(9))
        first = Training(TWO)
        with killed(first, file):
            kept = first.checkpoints(folder)
            for step in range(3):
                assert first.steps(range(step, step + 1)) == expected[step : step + 1]
                kept.commit(step + 1)
            assert Slots(file).step_in_use == 3
            assert Slots(file).leans(3)
        second = begin_again(folder, 3)
        with killed(second, file):
            assert Slots(file).step_in_use == 3
            second.optimizer.register_step_post_hook(fail)
            with pytest.raises(RuntimeError, match="killed"):
                second.steps(range(3, 4))
            assert Slots(file).step_in_use == -1
        third = begin_again(folder, 3)
        with killed(third, file):
            kept = third.checkpoints(folder)
            assert kept.load() is not None  # once more, into the same optimizer
            for step in range(3, 6):
                assert third.steps(range(step, step + 1)) == expected[step : step + 1]
                kept.commit(step + 1)
            assert Slots(file).leans(6)
        fourth = begin_again(folder, 6)
        with fourth.pipeline:
            assert Slots(file).step_in_use == 6
            assert fourth.steps(range(6, 9)) == expected[6:]


def go_on_after_close(rank: int, folder: Path) -> None:
    """What the optimizer does once nobody is told of it does not change what was committed."""
    with memory() as file, small_ones_count():
        first = Training(TWO)
        with first.pipeline:
            kept = first.checkpoints(folder)
            expected = first.steps(range(1))
            kept.commit(1)
            expected += first.steps(range(1, 2))
            kept.commit(2)
            assert Slots(file).leans(2)
            kept.close()
            assert (steps_in(file), Slots(file).step_in_use) == ([1, 2], -1)
            expected += first.steps(range(2, 4))
        again = begin_again(folder, 2)
        with again.pipeline:
            assert again.steps(range(2, 4)) == expected[2:]


def test_a_closed_training_leaves_its_state_whole(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, go_on_after_close, tmp_path)


def fail(*_: object) -> None:
    raise RuntimeError("killed")


def test_tensors_in_use_are_restored(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, go_on_from_tensors_in_use, tmp_path)


def go_on_beside_another(rank: int, folder: Path) -> None:
    """Another training in the same process gets its own tensors, and does not write to those of the first."""
    with memory() as file, small_ones_count():
        first = Training(TWO)
        with first.pipeline:
            kept = first.checkpoints(folder)
            for step in range(2):
                first.steps(range(step, step + 1))
                kept.commit(step + 1)
            again = begin_again(folder, 2, in_new_process=False)
            with again.pipeline:
                assert not Slots(file).leans(2)
                assert again.steps(range(2, 6)) == first.steps(range(2, 6))


def test_tensors_in_use_are_one_optimizers(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, go_on_beside_another, tmp_path)


def refuse_writes(rank: int, folder: Path) -> None:
    with memory() as file, small_ones_count():
        training = Training(TWO)
        with training.pipeline:
            kept = training.checkpoints(folder)
            for step in range(2):
                training.steps(range(step, step + 1))
                kept.commit(step + 1)
            state = next(iter(training.optimizer.state.values()))
            state["exp_avg"].mul_(2)
            with pytest.raises(PipelineError, match="written to between commit and the optimizer's next step"):
                training.optimizer.step()
            assert steps_in(file) == [1]


def test_the_optimizers_state_is_the_optimizers_alone(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, refuse_writes, tmp_path)


def copy_at_once(rank: int, folder: Path, why: str) -> None:
    """What is not safe to move, or was taken out of the memory, is copied as before."""
    with memory() as file, small_ones_count():
        training = Training(TWO)
        with training.pipeline:
            kept = training.checkpoints(folder)
            losses = training.steps(range(1))
            optimizer = training.optimizer
            views = []
            if why == "views":
                views = [state["exp_avg"].view(-1) for state in optimizer.state.values()]
                views += [state["exp_avg_sq"].view(-1) for state in optimizer.state.values()]
            kept.commit(1)
            for step in range(1, 4):
                losses += training.steps(range(step, step + 1))
                if why == "replaced":
                    optimizer.load_state_dict(optimizer.state_dict())
                    for state in optimizer.state.values():
                        state["exp_avg"] = state["exp_avg"].clone()
                kept.commit(step + 1)
                assert Slots(file).step_in_use == -1
            del views
        again = begin_again(folder, 4)
        with again.pipeline, training.pipeline:
            pass
        whole = Training(TWO)
        with whole.pipeline:
            assert whole.steps(range(4)) == losses


@pytest.mark.parametrize("why", ["views", "replaced"])
def test_what_cannot_be_in_use_is_copied_at_once(pool: Pool, tmp_path: Path, why: str) -> None:
    pool.run(2, copy_at_once, tmp_path, why)


# --- what not all have ------------------------------------------------------------------------------------------------


def go_on_together(rank: int, folder: Path) -> None:
    """Rank 0 has committed the step in which rank 1 was killed."""
    with memory() as file:
        first = Training(TWO)
        with first.pipeline:
            kept = first.checkpoints(folder)
            for step in range(3):
                first.steps(range(step, step + 1))
                if step < 2 or rank == 0:
                    kept.commit(step + 1)
        again = Training(TWO, split(model(1), TWO.plan().num_stages))
        with again.pipeline:
            found = again.checkpoints(folder).load()
            assert found is not None
            assert found.step == 2
            assert steps_in(file) == [2]


def test_a_step_that_not_all_ranks_have_is_not_committed(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, go_on_together, tmp_path)


def prefer_what_is_newer(rank: int, folder: Path) -> None:
    with memory() as file:
        first = Training(TWO)
        with first.pipeline:
            kept = first.checkpoints(folder)
            first.steps(range(1))
            kept.commit(1)
            first.steps(range(1, 3))
            kept.save(3)
        again = Training(TWO, split(model(1), TWO.plan().num_stages))
        with again.pipeline:
            found = again.checkpoints(folder).load()
            assert found is not None
            assert (found.step, found.path) == (3, folder / "step-3")
            assert steps_in(file) == []


def test_a_later_checkpoint_wins(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, prefer_what_is_newer, tmp_path)


def refuse(rank: int, folder: Path) -> None:
    with memory() as file:
        training = Training(TWO)
        with training.pipeline:
            kept = training.checkpoints(folder)
            training.steps(range(1))
            weight = next(training.pipeline.parameters())
            weight.grad = torch.ones_like(weight)
            with pytest.raises(PipelineError, match="has a gradient"):
                kept.commit(1)
            weight.grad = torch.zeros_like(weight)  # as zero_grad(set_to_none=False) leaves it
            kept.commit(1)
            with pytest.raises(PipelineError, match="step=-1"):
                kept.commit(-1)
            with pytest.raises(PipelineError, match="JSON"):
                kept.commit(2, data=object())
            assert steps_in(file) == [1]


def test_what_commit_refuses(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, refuse, tmp_path)


def leave_out(rank: int, folder: Path, what: str) -> None:
    with memory() as file, pytest.MonkeyPatch.context() as patch:
        training = Training(TWO)
        if what == "machine" and rank == 1:
            patch.setattr(checkpoints, "available_bytes", lambda: 1000)
        with training.pipeline:
            kept = training.checkpoints(folder)
            if what == "plan":
                plan = training.pipeline.plan
                cluster = replace(plan.placement.cluster, limit_bytes=(1000, 1000))
                training.pipeline.plan = replace(plan, placement=replace(plan.placement, cluster=cluster))
            training.steps(range(1))
            kept.commit(1)
            kept.commit(2)
            assert steps_in(file) == []
        dist.barrier()


@pytest.mark.parametrize("what", ["machine", "plan"])
def test_without_enough_memory_nothing_is_kept(pool: Pool, tmp_path: Path, what: str) -> None:
    pool.run(2, leave_out, tmp_path, what)


def test_without_a_supervisor_nothing_is_kept() -> None:
    assert kept_memory._KEPT not in os.environ
    assert kept_memory.given() is None
