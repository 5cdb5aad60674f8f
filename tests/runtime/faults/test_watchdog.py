"""Where a rank is stuck all end, in one message that says who waits for whom."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from rota import Cluster, Costs, Pipeline, PipelineError, Plan, Stages, place
from rota.errors import LostRankError
from rota.runtime.faults import watchdog
from rota.runtime.faults.watchdog import EXIT_CODE
from rota.schedules import NAMED
from support.fresh import Ended, mark, run_fresh
from support.networks import Layer, batch_of, loss_fn

pytestmark = pytest.mark.dist

NUM_RANKS, TIMEOUT_S = 3, 2.5


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


def assert_one_report(ended: list[Ended], *told: str) -> None:
    """All ranks end with the same message, which has all that is `told`, and none before its time."""
    assert max(each.after_s for each in ended) >= TIMEOUT_S * 0.9
    for each in ended:
        assert each.exit_code == EXIT_CODE == 70, each
        assert each.stderr == ended[0].stderr
        assert "Traceback" not in each.stderr
    for text in (f"rota: no progress for {TIMEOUT_S:g} s, so all ranks end: ", "a larger timeout_s", *told):
        assert text in ended[0].stderr, ended[0]


def hang(folder: Path, where: str, microbatch: int, schedule: str, num_steps: int = 1, **options: Any) -> list[Ended]:
    stages = stages_with(Stuck(where, microbatch), 1)
    return run_fresh(folder, NUM_RANKS, steps, stages, plan_for(schedule), num_steps, *options.values())


@pytest.mark.faults
def test_stage_that_hangs_in_its_forward(tmp_path: Path) -> None:
    assert_one_report(
        hang(tmp_path, "forward", 2, "1f1b"),
        "all ranks end: rank 1 makes no progress",
        "rank 0 waits for 1B1→0B1 from rank 1 for ",
        "rank 1 is at 1F2 (test_watchdog.py:",
        "in hang_if_it_is_time) for ",
        "rank 2 waits for 1F2→2F2 from rank 1 for ",
        "s, after 0F3 in step 1",
        "s, after 1B0 in step 1",
        "s, after 2B1 in step 1",
    )


def test_stage_that_hangs_in_its_backward_in_a_later_step_on_a_patient_rank(tmp_path: Path) -> None:
    """Its own limit is far away: it answers the others."""
    assert_one_report(
        hang(tmp_path, "backward", 4 + 1, "1f1b", 2, patient_rank=1),
        "all ranks end: rank 1 makes no progress",
        "rank 0 waits for 1B1→0B1 from rank 1 for ",
        "rank 1 is at 1B1 (test_watchdog.py:",
        "s, after 1F2 in step 2",
        "rank 2 waits for 1F3→2F3 from rank 1 for ",
    )


def test_rank_whose_messages_nobody_takes_names_the_transfer_and_the_peer(tmp_path: Path) -> None:
    assert_one_report(
        hang(tmp_path, "forward", 1, "forward_only"),
        "rank 0 waits for rank 1 to receive 0F2→1F2 for ",
        "rank 2 waits for 1F1→2F1 from rank 1 for ",
    )


class LosesARank(Layer):
    """Raises, in its second forward, what a message raises if Gloo reports that the other side is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, *values: Tensor) -> Tensor:
        self.forwards += 1
        if self.forwards == 2:
            mark()
            raise LostRankError("lost rank 1 while sending 0F0→1F0")
        return super().forward(*values)


def lose_a_rank_that_only_rank_0_notices(rank: int, looks: bool) -> None:
    """`looks`: rank 2 looks for losses of others while it waits; else it notices when rank 1 has ended."""
    stages = Stages([stage.double() for stage in (LosesARank(), Stuck("forward", 0), Layer())])
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2 and not looks:
            patch.setattr(watchdog, "_AFTER_A_FAILURE_S", math.inf)
        with Pipeline(stages, plan_for(), loss_fn, timeout_s=1000) as pipeline:
            pipeline.step(*batch_of(4))


@pytest.mark.parametrize("looks", [True, False])
def test_rank_that_waits_for_a_lost_one_ends_once_another_rank_has_noticed(tmp_path: Path, looks: bool) -> None:
    """Gloo never ends a send if the connection breaks after the receiver asked for it and before it is written.

    Ranks 1 and 2 are ended, whichever comes first: rank 2 does not take the end of rank 1 for the first error.
    """
    first, *others = run_fresh(tmp_path, NUM_RANKS, lose_a_rank_that_only_rank_0_notices, looks)
    told = "LostRankError: lost rank 1 while sending 0F0→1F0: look there for the first error"
    assert first.exit_code == 1
    assert first.last_line.endswith(told)
    lost = "lost rank 1 while waiting for 1F0→2F0"
    does = ["is at 1F0 ", f"waits for 1F0→2F0 from rank 1, |{lost}, " if looks else f"{lost}, "]
    for rank, ended in enumerate(others, start=1):
        assert ended.exit_code == EXIT_CODE, ended
        assert re.search(f"^rota: rank {rank} ({does[rank - 1]})", ended.last_line), ended
        assert ended.last_line.endswith(f", and was ended because another rank failed: rank 0: {told}")


@pytest.mark.parametrize(
    ("never", "waited"),
    [
        ("step", "the other ranks to reach the same step"),
        ("clip_grad_norm_", "the other ranks' norms"),
        ("timeline", "the other ranks' timelines"),
    ],
)
def test_rank_that_never_does_what_the_others_do(tmp_path: Path, never: str, waited: str) -> None:
    ended = run_fresh(tmp_path, NUM_RANKS, do_all_unless_rank_1, stages_with(Layer(), 1), plan_for(), never)
    assert_one_report(
        ended,
        "all ranks end: rank 1 never reached what the others wait for",
        f"rank 0 waits for {waited} for ",
        "rank 1 is outside of the pipeline's calls (test_watchdog.py:",
        " in sleep_long) for ",
        f"rank 2 waits for {waited} for ",
    )


@pytest.mark.faults
def test_rank_that_hangs_before_the_losses(tmp_path: Path) -> None:
    """It is still inside of the step, so it is the one that makes no progress."""
    ended = run_fresh(
        tmp_path, NUM_RANKS, do_all_unless_rank_1, stages_with(Layer(), 1), plan_for(), "_step_end.finish"
    )
    assert_one_report(
        ended,
        "all ranks end: rank 1 makes no progress",
        "rank 0 waits for the other ranks' losses for ",
        "rank 2 waits for the other ranks' losses for ",
        "(test_watchdog.py:",
    )


def do_all_unless_rank_1(rank: int, stages: Stages, plan: Plan, never: str) -> None:
    def sleep_long(*_: Any, **__: Any) -> None:
        time.sleep(1000)

    with Pipeline(stages, plan, loss_fn, timeout_s=TIMEOUT_S) as pipeline:
        pipeline.step(*batch_of(4))
        if rank == 1:
            owner, _, method = never.rpartition(".")
            setattr(getattr(pipeline, owner) if owner else pipeline, method, sleep_long)
        mark()
        pipeline.step(*batch_of(4))
        pipeline.clip_grad_norm_(1.0)
        pipeline.timeline()


def test_rank_that_makes_no_pipeline(tmp_path: Path) -> None:
    """The others have ten times as long there."""
    ended = run_fresh(tmp_path, NUM_RANKS, make_late, expected=(0, 2))
    assert ended[1].exit_code is None
    assert ended[0].exit_code == ended[2].exit_code == EXIT_CODE
    assert ended[0].stderr == ended[2].stderr
    for told in (
        "rota: no progress for 1 s, so all ranks end: rank 1 never answered; it is stopped, dead, or without a",
        "rank 0 waits for the other ranks to make their pipelines for ",
        "s, before the first op",
        "rank 1 did not answer within 5 s",
    ):
        assert told in ended[0].stderr, ended


def make_late(rank: int) -> None:
    if rank == 1:
        time.sleep(1000)
    Pipeline(stages_with(Layer(), 1), plan_for(), loss_fn, timeout_s=0.1)


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
