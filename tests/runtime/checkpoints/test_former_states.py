"""Going on with another number of ranks from memory: as from a checkpoint of the same step, to the bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from rota import Plan, replan
from rota.runtime import kept_memory
from rota.runtime.launcher_files import write_plan
from support.checkpoint_runs import Run, Training, refusal, serial_losses, steps_in
from support.pool import Pool

pytestmark = pytest.mark.dist


@dataclass(frozen=True)
class OfFour(Run):
    """Four stages on `num_ranks` ranks."""

    def plan(self) -> Plan:
        return replan(Run(self.schedule, 4).plan(), self.num_ranks)


@contextmanager
def memories(folder: Path, own: str, former: list[str]) -> Iterator[int]:
    """Files instead of the supervisor's memory, which the workers of the pool cannot inherit."""
    files = [os.open(folder / name, os.O_RDWR | os.O_CREAT) for name in (own, *former)]
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in kept_memory.environment_of(files).items():
                patch.setenv(name, value)
            patch.setenv("ROTA_FOLDER", str(folder))
            yield files[0]
    finally:
        for file in files:
            os.close(file)


def leave(rank: int, run: OfFour, folder: Path, saved: int = 3) -> None:
    """All commit step 3; all but the second rank commit step 4. Step 3 is saved as well, or another one."""
    with memories(folder, f"before-{rank}", []):
        training = Training(run)
        with training.pipeline:
            kept = training.checkpoints(folder / "reference")
            kept.commit(0, data=[])  # so that step 4 is the fifth commit, in which the ranks do not wait for each other
            for step in range(4):
                training.steps(range(step, step + 1))
                if step < 3 or rank != 1:
                    kept.commit(step + 1, data=[step])
                if step + 1 == saved:
                    kept.save(saved, data=[step])


def go_on(rank: int, before: OfFour, run: OfFour, folder: Path) -> list[float]:
    reference = Training(run)
    with reference.pipeline:
        saved = reference.checkpoints(folder / "reference").load(3)
        assert saved is not None
        expected, random_after = reference.steps(range(3, 6)), torch.rand(3)

    former = [f"before-{i}" for i in range(before.num_ranks)]
    with memories(folder, f"after-{rank}", former) as own:
        training = Training(run)
        with training.pipeline:
            kept = training.checkpoints(folder / "reference")
            found = kept.load()
            assert found is not None
            assert (found.step, found.extra, found.path) == (3, {"data": [2]}, None)
            assert found.plan == before.plan()
            assert steps_in(own) == []
            losses = training.steps(range(3, 4))
            kept.commit(4, data=[3])
        assert steps_in(own) == [4]

        again = Training(run)  # from its own memory, which is newer
        with again.pipeline:
            found = again.checkpoints(folder / "reference").load()
            assert found is not None
            assert (found.step, found.plan) == (4, run.plan())
            losses += again.steps(range(4, 6))
    assert losses == expected
    assert torch.equal(torch.rand(3), random_after)
    return losses


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 4)])
def test_another_number_of_ranks_takes_the_state_from_memory(
    pool: Pool, tmp_path: Path, before: int, after: int
) -> None:
    runs = OfFour("zb", before), OfFour("zb", after)
    write_plan(runs[1].plan(), str(tmp_path), runs[0].plan())
    pool.run(before, leave, runs[0], tmp_path)
    for losses in pool.run(after, go_on, *runs, tmp_path):
        assert losses == pytest.approx(serial_losses(6)[3:], abs=1e-12, rel=0)


def go_back(rank: int, before: OfFour, run: OfFour, folder: Path) -> None:
    former = [f"before-{i}" for i in range(before.num_ranks)]
    with memories(folder, f"after-{rank}", former):
        training = Training(run)
        with training.pipeline:
            kept = training.checkpoints(folder / "reference")
            found = kept.load()
            assert found is not None
            assert (found.step, found.path) == (3, None)
            assert kept.load(2) is not None
            expected = training.steps(range(2, 4))  # of which nothing is committed
        again = Training(run)
        with again.pipeline:
            found = again.checkpoints(folder / "reference").load()
            assert found is not None
            assert (found.step, found.path) == (2, folder / "reference" / "step-2")
            assert again.steps(range(2, 4)) == expected


def test_loading_an_earlier_checkpoint_forgets_what_another_number_of_ranks_has_left(
    pool: Pool, tmp_path: Path
) -> None:
    runs = OfFour("zb", 4), OfFour("zb", 3)
    write_plan(runs[1].plan(), str(tmp_path), runs[0].plan())
    pool.run(4, leave, runs[0], tmp_path, 2)
    pool.run(3, go_back, *runs, tmp_path)


def lack(rank: int, before: OfFour, run: OfFour, folder: Path) -> str:
    """The memory of the last rank is not among them."""
    with memories(folder, f"after-{rank}", [f"before-{i}" for i in range(before.num_ranks - 1)]):
        training = Training(run)
        with training.pipeline:
            return refusal(lambda: training.checkpoints(folder / "reference").load())


def test_a_stage_that_is_nowhere_is_refused(pool: Pool, tmp_path: Path) -> None:
    runs = OfFour("zb", 4), OfFour("zb", 3)
    pool.run(4, leave, runs[0], tmp_path)
    for told in pool.run(3, lack, *runs, tmp_path):
        assert "no process that ran before has model/" in told
