"""A checkpoint of any plan resumes on any other, exactly."""

import random
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from rota.runtime.checkpoints.values import same
from support.checkpoint_runs import CORE_RUNS, RUNS, Run, Training, serial_losses, stored
from support.pool import Pool

pytestmark = pytest.mark.dist

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
        training = Training(run)
        with training.pipeline:
            losses.append(training.steps(range(NUM_BEFORE)))
            training.checkpoints(folder / run.name).save(NUM_BEFORE, position=[NUM_BEFORE, "rows"])
    return losses


def load_and_train(rank: int, runs: list[Run], folder: Path, pairs: list[tuple[Run, Run]]) -> list[list[list[float]]]:
    """Resume from the canonical checkpoint, save that again, go on; then from each that `pairs` says."""
    losses = []
    for run in runs:
        training = Training(run)
        with training.pipeline:
            losses.append([])
            for source in [CANONICAL, *(a for a, b in pairs if b == run)]:
                found = training.checkpoints(folder / source.name).load()
                assert found is not None
                assert (found.step, found.extra) == (NUM_BEFORE, {"position": [NUM_BEFORE, "rows"]})
                assert found.plan == source.plan()
                if source == CANONICAL:
                    training.checkpoints(folder / f"again-{run.name}").save(found.step, **found.extra)
                losses[-1].append(training.steps(range(NUM_BEFORE, NUM_BEFORE + NUM_AFTER)))
    return losses


@pytest.mark.parametrize(
    ("runs", "num_pairs"), [(CORE_RUNS, 3), pytest.param(RUNS, 20, marks=pytest.mark.sweep)], ids=["core", "all"]
)
def test_every_plan_saves_the_same_and_resumes_from_any_other(
    pool: Pool, tmp_path: Path, runs: list[Run], num_pairs: int
) -> None:
    generator = random.Random(7)
    pairs = [(generator.choice(runs), generator.choice(runs)) for _ in range(num_pairs)]
    serial = serial_losses(NUM_BEFORE + NUM_AFTER)
    for losses in by_num_processes(pool, train_and_save, runs, tmp_path).values():
        assert losses == pytest.approx(serial[:NUM_BEFORE], abs=1e-10)
    tensors, small = stored(tmp_path / CANONICAL.name / f"step-{NUM_BEFORE}")
    for run in runs:
        found, beside = stored(tmp_path / run.name / f"step-{NUM_BEFORE}")
        assert found.keys() == tensors.keys()
        for key, tensor in found.items():
            torch.testing.assert_close(tensor, tensors[key], rtol=1e-10, atol=1e-10)
        assert same(beside, small)

    resumed = by_num_processes(pool, load_and_train, runs, tmp_path, pairs)
    assert sum(map(len, resumed.values())) == len(runs) + len(pairs)
    for run, of_sources in resumed.items():
        for losses in of_sources:
            assert losses == pytest.approx(serial[NUM_BEFORE:], abs=1e-10)
        again, beside = stored(tmp_path / f"again-{run.name}" / f"step-{NUM_BEFORE}")
        assert same(again, tensors)
        assert same(beside, small)
