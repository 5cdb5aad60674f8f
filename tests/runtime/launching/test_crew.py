"""A rank that is lost for good: the others finish the step, and go on, until a new one joins them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rota import Cluster, Costs, Plan, place, replan
from rota.backups import Backup, Backups, Place, plan_backup
from rota.runtime.kept_memory import KeptMemories, Slots, State
from rota.runtime.launching.crew import Crew
from rota.schedules import one_f_one_b
from rota.simulation import simulate
from support import replicated_training
from support.checkpoint_runs import steps_in
from support.pool import Pool
from support.replicated_training import NUM_MICROBATCHES, NUM_STAGES, train

SCRIPT = str(Path(replicated_training.__file__))
PLAN = one_f_one_b(place(Costs.uniform(NUM_STAGES, 100, 200), Cluster.uniform(NUM_STAGES)), NUM_MICROBATCHES)
NUM_STEPS = 14
FOUR = one_f_one_b(place(Costs.uniform(4, 100, 200), Cluster.uniform(4)), 4)


def backups_of(plan: Plan, num_replicas: int) -> Backups:
    found = []
    for rank in range(plan.num_ranks):
        backup = plan_backup(plan, num_replicas, [Place(0, rank)])
        found.append(Backup(rank, backup, simulate(backup).makespan_us, 0))
    return Backups(plan, num_replicas, tuple(found))


# --- who is there -----------------------------------------------------------------------------------------------------


def keep(file: int, step: int, data: bytes) -> None:
    slots = Slots(file)
    slots.begin(len(data))[:] = data
    slots.finish(step, len(data))


def test_the_others_keep_their_devices_and_memories_and_a_new_rank_gets_its_peers(tmp_path: Path) -> None:
    with KeptMemories(6) as memories:
        crew = Crew(PLAN, 3, 1, memories, backups_of(PLAN, 3), rejoin_after_s=5)
        whole = crew.environments(str(tmp_path))
        assert [one["ROTA_MESH"] for one in whole] == ["3 2 1"] * 6
        for number, file in enumerate(memories.files):
            keep(file, 7, bytes([number]))
            keep(file, 8 if number != 3 else 6, bytes([10 + number]))
        assert max(crew.states()) == (0, 7)
        before_s = time.monotonic()

        told = crew.lose(3, {State(0, 7)})  # rank 1 of replica 1
        assert told is not None
        assert told.startswith("the others go on without rank 1 of replica 1: makespan ")
        assert crew.members == [2, 0, 1, 4, 5]  # the replica that lost one comes first
        assert max(crew.states()) == (0, 8)
        assert crew.plan == backups_of(PLAN, 3).backups[1].plan
        assert crew.rejoin_at_s is not None
        assert crew.rejoin_at_s >= before_s + 5
        left = crew.environments(str(tmp_path))
        assert [one["LOCAL_RANK"] for one in left] == ["2", "0", "1", "4", "5"]
        assert [(one["RANK"], one["WORLD_SIZE"]) for one in left] == [(str(i), "5") for i in range(5)]
        assert {one["ROTA_MESH"] for one in left} == {"1 5 1"}
        assert steps_in(memories.files[3]) == []

        assert crew.lose(1, {State(0, 7)}) is None  # no step was done since then: the script is at fault
        assert crew.lose(None, {State(0, 9)}) is None  # a hang
        assert crew.lose(1, {State(0, 9)}) is not None  # rank 0 of replica 0; planned now
        assert crew.members == [1, 2, 4, 5]
        assert crew.plan.num_ranks == 4

        assert crew.rejoin() == "rank 1 of replica 1 and rank 0 of replica 0 join again"
        assert (crew.plan, crew.members, crew.rejoin_at_s) == (PLAN, [*range(6)], None)
        assert bytes(Slots(memories.files[3]).data(8)) == bytes([11])  # as rank 1 of replica 0 has it
        assert bytes(Slots(memories.files[0]).data(7)) == bytes([2])
        assert max(crew.states()) == (0, 8)


def test_without_peers_nobody_goes_on() -> None:
    with KeptMemories(4) as memories:
        assert Crew(PLAN, 2, 1, memories).lose(0, {State(0, 3)}) is None
        crew = Crew(PLAN, 2, 1, memories, backups_of(PLAN, 2))
        assert crew.lose(0, {State(0, 3)}) is not None
        assert crew.members == [1, 2, 3]
        assert crew.lose(1, {State(0, 5)}) is None  # rank 0 of replica 1, the last one with stage 0
        assert crew.members == [1, 2, 3]


def test_fewer_ranks_get_what_all_had_in_memory(tmp_path: Path) -> None:
    with KeptMemories(4) as memories:
        crew = Crew(FOUR, 1, 1, memories, rejoin_after_s=None, min_ranks=2)
        for number, file in enumerate(memories.files):
            keep(file, 7, bytes([number]))
            keep(file, 8 if number != 2 else 6, bytes([10 + number]))
        assert [len(files) for files in crew.files_of_start()] == [1] * 4

        told = crew.lose(1, {State(0, 7)})
        assert told is not None
        assert told.startswith("the others go on without rank 1: makespan ")
        assert (crew.members, crew.plan, crew.former_plan) == ([0, 2, 3], replan(FOUR, 3), FOUR)
        assert crew.rejoin_at_s is None
        left = crew.environments(str(tmp_path))
        assert [one["LOCAL_RANK"] for one in left] == ["0", "2", "3"]
        assert {one["ROTA_MESH"] for one in left} == {"1 3 1"}
        files = crew.files_of_start()
        assert [steps_in(own) for own, *_ in files] == [[]] * 3
        for _, *former in files:
            assert [bytes(Slots(file).data(7)) for file in former] == [bytes([i]) for i in range(4)]
        assert max(crew.states()) == (0, 7)
        assert crew.lose(0, {State(0, 7)}) is None  # no step was done since then

        for own in (memories.files[0], memories.files[2]):
            keep(own, 8, b"new")
        assert len(crew.files_of_start()[0]) == 5  # one has not committed: all go on from step 7 again
        keep(memories.files[3], 8, b"last")
        assert len(crew.files_of_start()[0]) == 1
        assert crew.former_plan is None

        assert crew.lose(2, {State(0, 8)}) is not None
        assert (crew.members, crew.former_plan) == ([0, 2], replan(FOUR, 3))
        assert crew.plan == replan(FOUR, 2)
        assert [bytes(Slots(file).data(8)) for file in crew.files_of_start()[0][1:]] == [b"new", b"new", b"last"]
        for member in crew.members:
            keep(memories.files[member], 9, b"two")
        assert crew.lose(0, {State(0, 9)}) is None  # fewer than two

        assert crew.rejoin() == "rank 1 and rank 3 join again"
        assert (crew.plan, crew.members, crew.former_plan) == (FOUR, [0, 1, 2, 3], replan(FOUR, 2))
        assert [bytes(Slots(file).data(9)) for file in crew.files_of_start()[3][1:]] == [b"two", b"two"]


def test_what_only_some_have_committed_is_not_taken_for_another_plans(tmp_path: Path) -> None:
    """Nobody has committed a step when the second rank is lost, but the others have begun to."""
    with KeptMemories(4) as memories:
        crew = Crew(FOUR, 1, 1, memories, rejoin_after_s=None, min_ranks=2)
        for number in (0, 2, 3):
            keep(memories.files[number], 1, b"one")
        assert crew.lose(1, set()) is not None
        assert [[steps_in(file) for file in files] for files in crew.files_of_start()] == [[[]]] * 3


def test_a_rank_may_be_lost_in_a_second_training_too() -> None:
    """Its steps are lower than those of the first one, which were done before the last loss."""
    with KeptMemories(4) as memories:
        crew = Crew(FOUR, 1, 1, memories, rejoin_after_s=None, min_ranks=1)
        assert crew.lose(1, {State(0, 7)}) is not None
        assert crew.lose(1, {State(0, 5), State(1, 2)}) is not None
        assert crew.lose(1, {State(0, 7), State(1, 2)}) is None
        assert crew.lose(1, {State(0, 7), State(1, 3)}) is not None


def test_memories_of_another_plan_are_freed_when_the_training_has_gone_back(tmp_path: Path) -> None:
    """To a checkpoint: then its ranks take the steps out of these memories."""
    with KeptMemories(4) as memories:
        crew = Crew(FOUR, 1, 1, memories, rejoin_after_s=None, min_ranks=2)
        for file in memories.files:
            keep(file, 7, b"seven")
        assert crew.lose(1, {State(0, 7)}) is not None
        _, *former = crew.files_of_start()[0]
        for file in former[:2]:
            Slots(file).drop(7)
        assert [len(files) for files in crew.files_of_start()] == [1] * 3
        assert (memories.former, crew.former_plan) == ([], None)


# --- in a run ---------------------------------------------------------------------------------------------------------


def undisturbed(rank: int, plan: Plan) -> list[tuple[int, float]]:
    return train(plan, NUM_STEPS, dp=2)


def disturbed(
    folder: Path, faults: list[list[int]], *options: str, join_at: int = -1, what: str = str(NUM_STEPS)
) -> subprocess.CompletedProcess[str]:
    (folder / "tmp").mkdir(parents=True)
    (folder / "faults.json").write_text(json.dumps(faults))
    (folder / "plan.json").write_text(PLAN.to_json())
    (folder / "backups.json").write_text(backups_of(PLAN, 2).to_json())
    command = [sys.executable, "-m", "rota", "run", "--backups", "backups.json", *options, "plan.json", SCRIPT]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp")}
    return subprocess.run(
        [*command, what, str(join_at)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


def told(folder: Path) -> list[Any]:
    return [tuple(json.loads(line)) for line in (folder / "losses").read_text().splitlines()]


@pytest.mark.dist
@pytest.mark.faults
def test_the_others_finish_the_step_and_a_new_rank_joins(pool: Pool, tmp_path: Path) -> None:
    """Given up at once; joins at step 7; the next loss, of the first process of all, comes after that."""
    expected = dict(pool.run(2 * NUM_STAGES, undisturbed, PLAN)[0])
    done = disturbed(tmp_path, [[3, 0, 1], [10, 0, 0]], "--rejoin-after", "6", join_at=7)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith(("rota run: rank", "rota: training"))]
    assert lines[:6] == [
        "rota run: rank 1 ended with SIGKILL: the others go on without rank 1 of replica 0: makespan 2.5 ms, with all "
        "ranks 1.5 ms",
        "rota: training resumes from step 3 in memory",
        "rota run: rank 1 of replica 0 joins again",
        "rota: training resumes from step 7 in memory",
        "rota run: rank 0 ended with SIGKILL: the others go on without rank 0 of replica 0: makespan 2.4 ms, with all "
        "ranks 1.5 ms",
        "rota: training resumes from step 10 in memory",
    ]
    found = told(tmp_path)
    assert [(step, ranks) for step, _, ranks in found] == [
        (step, 3 if 3 <= step < 7 or step >= 10 else 2) for step in range(NUM_STEPS)
    ]
    for step, loss, _ in found:
        assert loss == pytest.approx(expected[step], abs=1e-12, rel=0)
    assert not [*(tmp_path / "run").glob("step-*")]  # nothing was read from a checkpoint, as there is none
    assert not [*(tmp_path / "tmp").glob("rota-*")]


@pytest.mark.dist
@pytest.mark.faults
def test_two_are_lost_and_with_the_third_all_is(pool: Pool, tmp_path: Path) -> None:
    """The stages of both are left in other replicas, so two ranks do the work of four; then stage 0 is nowhere."""
    expected = dict(pool.run(2 * NUM_STAGES, undisturbed, PLAN)[0])
    done = disturbed(tmp_path, [[3, 0, 1], [6, 1, 0], [9, 0, 0]], "--max-restarts", "0")
    assert done.returncode == 1
    found = told(tmp_path)
    assert [(step, ranks) for step, _, ranks in found] == [
        (step, 2 if step < 3 or step >= 6 else 3) for step in range(9)
    ]
    for step, loss, _ in found:
        assert loss == pytest.approx(expected[step], abs=1e-12, rel=0)
    assert "the others go on without rank 0 of replica 1: makespan " in done.stderr
    assert done.stderr.splitlines()[-1].startswith("rota run: error: rank 0 ended with SIGKILL after 0 restarts")


def of_steps(folder: Path) -> list[tuple[int, float, list[int]]]:
    """Each step as it was done, its loss, and the samples of all replicas."""
    found: dict[int, list[Any]] = {}
    for step, loss, _, numbers in told(folder):
        found.setdefault(step, []).append((loss, numbers))
    return [(step, of[0][0], sorted(n for _, numbers in of for n in numbers)) for step, of in sorted(found.items())]


@pytest.mark.dist
@pytest.mark.faults
def test_no_sample_is_lost_or_seen_twice(tmp_path: Path) -> None:
    """Given up in the middle of an epoch, and back in the middle of the next one, which was begun without it."""
    expected, found = (tmp_path / name for name in ("undisturbed", "disturbed"))
    done = disturbed(expected, [], what="epochs")
    assert done.returncode == 0, done.stderr
    done = disturbed(found, [[2, 0, 1]], "--rejoin-after", "6", join_at=7, what="epochs")
    assert done.returncode == 0, done.stderr
    lines = [line.partition(": makespan")[0] for line in done.stderr.splitlines() if line.startswith("rota")]
    assert lines[0].startswith("rota: states are kept in memory: they need ")
    assert lines[1:] == [
        "rota run: rank 1 ended with SIGKILL: the others go on without rank 1 of replica 0",
        "rota: training resumes from step 2 in memory",
        "rota run: rank 1 of replica 0 joins again",
        "rota: training resumes from step 7 in memory",
    ]
    for (step, loss, numbers), (same, other, others) in zip(of_steps(found), of_steps(expected), strict=True):
        assert (step, numbers) == (same, others)
        assert loss == pytest.approx(other, abs=1e-12, rel=0)
    for first in (0, 5):
        seen = {number for *_, numbers in of_steps(found)[first : first + 5] for number in numbers}
        assert seen == {*range(replicated_training.NUM_SAMPLES)}
