"""A rank that is stuck is ended in time, and says what it was at."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from torch import Tensor, nn

from dist.fresh import Ended, mark, run_fresh
from dist.networks import Layer, batch_of, loss_fn
from rota import Cluster, Costs, Pipeline, PipelineError, Plan, Stages, place
from rota.runtime.watchdog import EXIT_CODE
from rota.schedules import NAMED

NUM_RANKS, TIMEOUT_S = 3, 1.5


class Stuck(Layer):
    """Hangs in the forward or backward of one micro-batch (they come in order)."""

    def __init__(self, where: str, microbatch: int) -> None:
        super().__init__()
        self.where, self.left = where, microbatch

    def hang_if_it_is_time(self) -> None:
        self.left -= 1
        if self.left < 0:
            mark()
            time.sleep(1000)

    def forward(self, *values: Tensor) -> Tensor:
        if self.where == "forward":
            self.hang_if_it_is_time()
        output = super().forward(*values)
        if self.where == "backward":
            output.register_hook(lambda _: self.hang_if_it_is_time())
        return output


def plan_for(schedule: str = "1f1b", num_microbatches: int = 4) -> Plan:
    placement = place(Costs.uniform(NUM_RANKS, 10, 20), Cluster.uniform(NUM_RANKS))
    if schedule == "forward_only":
        placement = placement.forward_only()
    return NAMED[schedule](placement, num_microbatches)


def stages_with(stuck: nn.Module, at: int) -> Stages:
    return Stages([(stuck if stage == at else Layer()).double() for stage in range(NUM_RANKS)])


def steps(rank: int, stages: Stages, plan: Plan, num_steps: int = 1, patient_rank: int = -1) -> None:
    with Pipeline(stages, plan, loss_fn, timeout_s=1000 if rank == patient_rank else TIMEOUT_S) as pipeline:
        for _ in range(num_steps):
            mark()
            pipeline.step(*batch_of(plan.num_microbatches))


def assert_ended_in_time(ended: Ended) -> None:
    assert ended.exit_code == EXIT_CODE == 70, ended
    assert TIMEOUT_S * 0.8 <= ended.after_s <= TIMEOUT_S + 3, ended


def assert_waited_or_lost(ended: Ended, transfer: str, peer: int) -> None:
    """Ended by its own watchdog, or by losing the stuck rank to that one's: the same place either way."""
    if ended.exit_code == EXIT_CODE:
        assert transfer in ended.last_line, ended
        assert f"rank {peer}" in ended.last_line, ended
    else:
        assert ended.exit_code == 1, ended
        assert f"LostRankError: lost rank {peer} while waiting for {transfer}" in ended.last_line, ended


def test_stage_that_hangs_in_its_forward(tmp_path: Path) -> None:
    ended = run_fresh(tmp_path, NUM_RANKS, steps, stages_with(Stuck("forward", 2), 1), plan_for())
    assert_ended_in_time(ended[1])
    assert "rota: rank 1 was at 1F2" in ended[1].last_line
    assert f"and was ended by the watchdog (timeout_s={TIMEOUT_S:g})" in ended[1].last_line
    assert_waited_or_lost(ended[0], "1B1→0B1", 1)
    assert_waited_or_lost(ended[2], "1F2→2F2", 1)


def test_stage_that_hangs_in_its_backward_in_a_later_step(tmp_path: Path) -> None:
    ended = run_fresh(tmp_path, NUM_RANKS, steps, stages_with(Stuck("backward", 4 + 1), 1), plan_for(), 2)
    assert_ended_in_time(ended[1])
    assert "rota: rank 1 was at 1B1" in ended[1].last_line


def run_with_patient_rank_1(folder: Path, stages: Stages, plan: Plan, num_steps: int = 1) -> list[Ended]:
    """The others are ended by their own watchdogs, as rank 1 has none to speak of."""
    ended = run_fresh(folder, NUM_RANKS, steps, stages, plan, num_steps, 1, expected=(0, 2))
    assert ended[1].exit_code is None
    for rank in (0, 2):
        assert_ended_in_time(ended[rank])
    return ended


def test_ranks_that_wait_name_the_transfer_and_the_peer(tmp_path: Path) -> None:
    ended = run_with_patient_rank_1(tmp_path, stages_with(Stuck("forward", 8 + 2), 1), plan_for(), 3)
    assert "rota: rank 0 was at 0B1 (which waits for 1B1→0B1 from rank 1) for" in ended[0].last_line
    assert "rota: rank 2 was at 2F2 (which waits for 1F2→2F2 from rank 1) for" in ended[2].last_line


def test_ranks_that_wait_in_the_first_step_too(tmp_path: Path) -> None:
    ended = run_with_patient_rank_1(tmp_path, stages_with(Stuck("forward", 2), 1), plan_for())
    assert "rota: rank 0 was at 0B1 (which waits for 1B1→0B1 from rank 1) for" in ended[0].last_line
    assert "rota: rank 2 was at 1F2→2F2 between rank 1 and rank 2 for" in ended[2].last_line


def test_rank_whose_messages_nobody_takes_names_the_transfer_and_the_peer(tmp_path: Path) -> None:
    ended = run_with_patient_rank_1(tmp_path, stages_with(Stuck("forward", 1), 1), plan_for("forward_only"))
    assert "rota: rank 0 waited for rank 1 to receive 0F2→1F2 for" in ended[0].last_line


@pytest.mark.parametrize(
    ("never", "waited", "lost"),
    [
        ("step", "the other ranks to reach the same step", "waiting for the others to begin the step"),
        ("_loss_of", "the other ranks' losses", "waiting for the other ranks' losses"),
    ],
)
def test_rank_that_never_does_what_the_others_do(tmp_path: Path, never: str, waited: str, lost: str) -> None:
    stages = stages_with(Layer(), 1)
    ended = run_fresh(tmp_path, NUM_RANKS, step_unless_rank_1, stages, plan_for(), never, expected=(0, 2))
    first, second = sorted((0, 2), key=lambda rank: ended[rank].exit_code != EXIT_CODE)
    assert_ended_in_time(ended[first])
    assert f"rota: rank {first} waited for {waited} for" in ended[first].last_line
    if ended[second].exit_code != EXIT_CODE:  # it lost the first while it waited
        assert f"LostRankError: lost a rank while {lost}" in ended[second].last_line


def step_unless_rank_1(rank: int, stages: Stages, plan: Plan, never: str) -> None:
    with Pipeline(stages, plan, loss_fn, timeout_s=TIMEOUT_S) as pipeline:
        pipeline.step(*batch_of(4))
        mark()
        if rank == 1:
            setattr(pipeline, never, lambda *_: time.sleep(1000))
        pipeline.step(*batch_of(4))


# --- and no other ---------------------------------------------------------------------------------------------------


class Slow(Layer):
    def forward(self, *values: Tensor) -> Tensor:
        time.sleep(0.2)
        return super().forward(*values)


class Broken(Layer):
    def forward(self, *values: Tensor) -> Tensor:
        raise ValueError("broken on purpose")


def take_time(rank: int, plan: Plan) -> None:
    """A step that takes longer than the timeout, a long rest after it, and a long rest after a broken one."""
    slow, broken = (Stages([layer().double() for _ in range(NUM_RANKS)]) for layer in (Slow, Broken))
    with Pipeline(slow, plan, loss_fn, timeout_s=TIMEOUT_S) as pipeline:
        pipeline.step(*batch_of(plan.num_microbatches))
        time.sleep(TIMEOUT_S + 0.3)
    error, told = (ValueError, "on purpose") if rank == 0 else (PipelineError, "lost rank")
    with Pipeline(broken, plan, loss_fn, timeout_s=TIMEOUT_S if rank == 0 else 1000) as pipeline:
        with pytest.raises(error, match=told):
            pipeline.step(*batch_of(plan.num_microbatches))
        time.sleep(TIMEOUT_S + 0.3 if rank == 0 else 0)


def test_slow_steps_rests_and_failed_steps_do_not_wake_it(tmp_path: Path) -> None:
    for ended in run_fresh(tmp_path, NUM_RANKS, take_time, plan_for(num_microbatches=8)):
        assert ended.exit_code == 0, ended
