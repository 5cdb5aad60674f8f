"""Saving and loading: names, atomic and asynchronous writes, what is kept, what is refused."""

import random
import threading
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from rota import Checkpoints, Cluster, Costs, Pipeline, Stages, interleaved, place
from rota.runtime import checkpoints
from rota.runtime.checkpoints import checkpoint_folder
from rota.runtime.checkpoints.checkpoint_folder import LOCK, readable_ones
from rota.runtime.checkpoints.values import same
from rota.schedules import interleaved_one_f_one_b, one_f_one_b
from support.checkpoint_runs import CORE_RUNS, RUNS, TWO, Run, Training, serial_losses, stored
from support.networks import batch_of, loss_fn, refusal
from support.pool import Pool, on_ranks
from support.sampling import swept


def names_in(folder: Path) -> list[str]:
    """The lock apart."""
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)


def whole_in(folder: Path) -> list[str]:
    return [saved.path.name for saved in readable_ones(folder)[0]]


def save_in_the_background(rank: int, folder: Path) -> tuple[list[str], list[str], list[float]]:
    training, wait = Training(TWO), threading.Event()
    begin = checkpoint_folder.begin
    with training.pipeline, pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_folder, "begin", lambda *args: wait.wait(100) and begin(*args))
        background = training.checkpoints(folder, asynchronous=True)
        training.steps(range(2))
        data = {"rows": [0, 1]}
        background.save(2, data=data)
        data["rows"].append(2)
        expected = training.steps(range(2, 5))  # while the thread waits, and after what it is to write
        before = names_in(folder)
        torch.distributed.barrier()
        wait.set()
        background.wait()
        after = names_in(folder)
        assert background.load().extra == {"data": {"rows": [0, 1]}}
        assert training.steps(range(2, 5)) == expected
        background.save(5)
    return before, after, expected


def test_a_thread_writes_what_was_there_when_save_was_called(pool: Pool, tmp_path: Path) -> None:
    for before, after, losses in pool.run(2, save_in_the_background, tmp_path):
        assert before == []
        assert after == ["step-2"]
        assert losses == pytest.approx(serial_losses(5)[2:], abs=1e-10)
    assert names_in(tmp_path) == ["step-2", "step-5"]  # closing the pipeline waited for the second


class DiskFull:
    """Lets `num_good` calls through, then fails."""

    def __init__(self, function: Callable[..., Any], num_good: int = 0) -> None:
        self.function, self.num_good = function, num_good

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.num_good -= 1
        if self.num_good < 0:
            raise OSError(28, "No space left on device")
        return self.function(*args, **options)


def fail_to_save(rank: int, folder: Path) -> list[tuple[str, list[str], int]]:
    places = [
        (0, checkpoint_folder, "begin", 0),
        (1, checkpoints, "chunks_of", 0),
        (1, checkpoints, "write_file", 0),
        (0, checkpoint_folder, "publish", 0),
    ]
    told = []
    for asynchronous in (False, True):
        with Training(TWO) as training:
            saver = training.checkpoints(folder / str(asynchronous), asynchronous=asynchronous)
            saver.save(1)
            for on, owner, name, num_good in places:
                saver.wait()
                with pytest.MonkeyPatch.context() as patch:
                    if rank == on:
                        full = DiskFull(getattr(owner, name), num_good)
                        # A plain function, so that it becomes a method where it has to.
                        patch.setattr(owner, name, lambda *args, _full=full, **options: _full(*args, **options))
                    words = refusal(lambda c=saver: (c.save(2), c.wait()))
                told.append((words, whole_in(folder / str(asynchronous))))
                assert saver.load().step == 1
            saver.save(2)
            saver.wait()
            assert saver.load().step == 2
    return told


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_what_was_there(pool: Pool, tmp_path: Path) -> None:
    for told in pool.run(2, fail_to_save, tmp_path):
        for on, (words, whole) in zip((0, 1, 1, 0) * 2, told, strict=True):
            assert words.startswith("checkpoint: ")
            assert f"process {on}: OSError: [Errno 28] No space left on device" in words
            assert whole == ["step-1"]
    for mode in ("False", "True"):
        assert names_in(tmp_path / mode) == ["step-1", "step-2"]


@on_ranks(1)
def test_a_save_that_could_not_be_loaded_is_refused(rank: int, tmp_path: Path) -> None:
    stage = nn.Sequential()
    stage.add_module("a\nb", nn.Linear(4, 4))
    plan = one_f_one_b(place(Costs.uniform(1), Cluster.uniform(1)), 2)
    with Pipeline(Stages([stage]), plan, loss_fn) as pipeline:
        words = refusal(lambda: Checkpoints(tmp_path, pipeline, None).save(1))
    assert "could not be read again" in words
    assert "expected a name of 1 to 1,000 printable characters" in words
    assert whole_in(tmp_path) == []


def keep_two(rank: int, folder: Path) -> list[Any]:
    with Training(TWO) as training:
        saver = training.checkpoints(folder, keep=2)
        assert saver.load() is None
        told: list[Any] = [refusal(lambda: saver.load(7))]
        for step in (1, 2, 3):
            training.steps(range(step, step + 1))
            saver.save(step)
        told.append(names_in(folder) if rank == 0 else None)
        told.append(refusal(lambda: saver.load(1)))
        saver.load(2)
        saver.save(2, again=True)  # what came after belongs to another future now
        told.append((saver.load().step, saver.load().extra))
        saver.save(1)
        return told


def test_the_newest_are_kept_whatever_their_steps(pool: Pool, tmp_path: Path) -> None:
    for rank, (none, kept, gone, newest) in enumerate(pool.run(2, keep_two, tmp_path)):
        assert f"no whole checkpoint of step 7 in {tmp_path}; it has no checkpoints" in none
        assert kept == (["step-2", "step-3"] if rank == 0 else None)
        assert f"no whole checkpoint of step 1 in {tmp_path}; it has steps 2, 3" in gone
        assert newest == (2, {"again": True})
    assert names_in(tmp_path) == ["step-1", "step-2"]


class Noisy(nn.Module):
    """Dropout, and a buffer that every micro-batch changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(6, 6), nn.Dropout(0.3)
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.num_seen += 1
        return self.dropout(self.linear(x)) / (1 + self.num_seen)


def resume_noisy(rank: int, folder: Path) -> list[Any]:
    def training(seed: int) -> tuple[Pipeline, torch.optim.Optimizer, Callable[[], Any]]:
        torch.manual_seed(seed)
        stages = Stages([Noisy().double() for _ in range(4)])
        plan = interleaved_one_f_one_b(interleaved(Costs.uniform(4), Cluster.uniform(2)), 4)
        pipeline = Pipeline(stages, plan, loss_fn)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)

        def step() -> Any:
            loss = pipeline.step(*batch_of(4, seed=int(torch.randint(100, ()))))
            optimizer.step()
            optimizer.zero_grad()
            return loss, random.random(), numpy.random.rand()

        return pipeline, optimizer, step

    pipeline, optimizer, step = training(seed=0)
    random.seed(rank)  # loading makes them one
    numpy.random.seed(rank)
    with pipeline:
        step()
        Checkpoints(folder, pipeline, optimizer).save(1)
        expected = [step() for _ in range(3)]
    pipeline, optimizer, step = training(seed=1)
    with pipeline:
        Checkpoints(folder, pipeline, optimizer).load()
        return [expected, [step() for _ in range(3)], [int(stage.num_seen) for stage in pipeline.local_stages.values()]]


def test_random_state_and_buffers_go_on_as_they_were(pool: Pool, tmp_path: Path) -> None:
    by_rank = pool.run(2, resume_noisy, tmp_path)
    for _, resumed, num_seen in by_rank:
        assert resumed == by_rank[0][0]
        assert num_seen == [16, 16]
    tensors, _ = stored(tmp_path / "step-1")
    assert {key for key in tensors if "num_seen" in key} == {f"model/{stage}.num_seen" for stage in range(4)}
    assert not any("cache" in key for key in tensors)


# --- a checkpoint of any plan resumes on any other, exactly -----------------------------------------------------------


NUM_BEFORE, NUM_AFTER = 2, 4
CANONICAL = RUNS[0]


def by_num_processes(pool: Pool, function: Any, runs: list[Run], folder: Path, *args: Any) -> dict[Run, Any]:
    """What `function(rank, runs, folder, …)` returns for each run, all of as many processes in one job."""
    found: dict[Run, Any] = {}
    for num_processes, group in groupby(sorted(runs, key=lambda run: run.num_processes), lambda run: run.num_processes):
        together = [*group]
        results = pool.run(num_processes, function, together, folder, *args)
        assert all(result == results[0] for result in results)  # losses are the same on every rank
        found |= dict(zip(together, results[0], strict=True))
    return found


def train_and_save(rank: int, runs: list[Run], folder: Path) -> list[list[float]]:
    losses = []
    for run in runs:
        with Training(run) as training:
            losses.append(training.steps(range(NUM_BEFORE)))
            training.checkpoints(folder / run.name).save(NUM_BEFORE, position=[NUM_BEFORE, "rows"])
    return losses


def load_and_train(rank: int, runs: list[Run], folder: Path, pairs: list[tuple[Run, Run]]) -> list[list[list[float]]]:
    """Resume from the canonical checkpoint, save that again, go on; then from each that `pairs` says."""
    losses = []
    for run in runs:
        with Training(run) as training:
            losses.append([])
            for source in [CANONICAL, *(a for a, b in pairs if b == run)]:
                found = training.checkpoints(folder / source.name).load()
                assert (found.step, found.extra) == (NUM_BEFORE, {"position": [NUM_BEFORE, "rows"]})
                assert found.plan == source.plan()
                if source == CANONICAL:
                    training.checkpoints(folder / f"again-{run.name}").save(found.step, **found.extra)
                losses[-1].append(training.steps(range(NUM_BEFORE, NUM_BEFORE + NUM_AFTER)))
    return losses


@pytest.mark.parametrize(("runs", "num_pairs"), [(CORE_RUNS, 3), swept(RUNS, 20)], ids=["core", "all"])
def test_every_plan_saves_the_same_for_any_other(pool: Pool, tmp_path: Path, runs: list[Run], num_pairs: int) -> None:
    generator = random.Random(7)
    pairs = [(generator.choice(runs), generator.choice(runs)) for _ in range(num_pairs)]
    serial = serial_losses(NUM_BEFORE + NUM_AFTER)
    for losses in by_num_processes(pool, train_and_save, runs, tmp_path).values():
        assert losses == pytest.approx(serial[:NUM_BEFORE], abs=1e-10)
    tensors, small = stored(tmp_path / CANONICAL.name / f"step-{NUM_BEFORE}")
    for run in runs:
        found, beside = stored(tmp_path / run.name / f"step-{NUM_BEFORE}")
        torch.testing.assert_close(found, tensors, rtol=1e-10, atol=1e-10)
        assert same(beside, small)

    resumed = by_num_processes(pool, load_and_train, runs, tmp_path, pairs)
    assert sum(map(len, resumed.values())) == len(runs) + len(pairs)
    for run, of_sources in resumed.items():
        for losses in of_sources:
            assert losses == pytest.approx(serial[NUM_BEFORE:], abs=1e-10)
        again, beside = stored(tmp_path / f"again-{run.name}" / f"step-{NUM_BEFORE}")
        assert same(again, tensors)
        assert same(beside, small)
