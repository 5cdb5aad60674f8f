"""Where a rank is stuck all end, in one message that says who waits for whom."""

import ctypes
import faulthandler
import math
import re
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import ClassVar

import pytest
from torch import Tensor

from rota import Pipeline, PipelineError, Plan, Stages
from rota.core.errors import LostRankError
from rota.runtime.faults import watchdog
from rota.runtime.faults.hang_report import Doing
from rota.runtime.faults.watchdog import EXIT_CODE
from support.faulty_stages import NUM_RANKS, Fails, break_on_purpose, hang, plan_for, stages_with
from support.fresh import Ended, run_fresh
from support.networks import Layer, batch_of, loss_fn
from support.watch_clock import WatchClock, once_all_are

pytestmark = pytest.mark.dist

TIMEOUT_S = 100.0  # which pass at once, see WatchClock


def steps(
    rank: int, stages: Stages, plan: Plan, num_steps: int, patient_rank: int, folder: Path, where: dict[int, str]
) -> None:
    """`where`: see `once_all_are`."""
    WatchClock(once_all_are(folder, rank, where))
    with Pipeline(stages, plan, loss_fn, timeout_s=1000 if rank == patient_rank else TIMEOUT_S) as pipeline:
        for _ in range(num_steps):
            pipeline.step(*batch_of(plan.num_microbatches))


def assert_one_report(ended: list[Ended], *message: str) -> None:
    """All ranks end with the same message, which has all that is `message`."""
    for process in ended:
        assert process.exit_code == EXIT_CODE == 70, process
        assert process.stderr == ended[0].stderr
        assert "Traceback" not in process.stderr
    for text in ("a larger timeout_s", *message):
        assert text in ended[0].stderr, ended[0]


def run_stuck(
    folder: Path, stuck: Fails, schedule: str, where: dict[int, str], num_steps: int = 1, patient_rank: int = -1
) -> list[Ended]:
    """Rank 1 gets stuck; time passes once all are `where` they will be then."""
    plan = plan_for(schedule)
    return run_fresh(folder, NUM_RANKS, steps, stages_with(stuck, 1), plan, num_steps, patient_rank, folder, where)


def test_stage_that_hangs_in_its_backward_in_a_later_step_on_a_patient_rank(tmp_path: Path) -> None:
    """Its own limit is far away: it answers the others."""
    where = {0: "waits for 1B1→0B1.*step 2", 1: "is at 1B1 .*hang", 2: "waits for 1F3→2F3.*step 2"}
    assert_one_report(
        run_stuck(tmp_path, Fails(hang, "backward", 4 + 1), "1f1b", where, num_steps=2, patient_rank=1),
        "rota: no progress for 100 s, so all ranks end: rank 1 makes no progress",
        "rank 0 waits for 1B1→0B1 from rank 1 for ",
        "rank 1 is at 1B1 (faulty_stages.py:",
        "s, after 1F2 in step 2",
        "rank 2 waits for 1F3→2F3 from rank 1 for ",
    )


def test_rank_whose_messages_nobody_takes_names_the_transfer_and_the_peer(tmp_path: Path) -> None:
    where = {0: "waits for rank 1 to receive 0F2→1F2", 1: "hang", 2: "waits for 1F1→2F1"}
    assert_one_report(
        run_stuck(tmp_path, Fails(hang, "forward", 1), "forward_only", where),
        "rank 0 waits for rank 1 to receive 0F2→1F2 for ",
        "rank 2 waits for 1F1→2F1 from rank 1 for ",
    )


def lose_a_rank() -> None:
    """As a message does if Gloo reports that the other side is gone."""
    raise LostRankError("lost rank 1", "sending 0F0→1F0")


def lose_a_rank_that_only_rank_0_notices(rank: int, looks: bool) -> None:
    """`looks`: rank 2 looks for losses of others while it waits; else it notices when rank 1 has ended."""
    layers = Fails(lose_a_rank, "forward", 1), Fails(hang, "forward", 0), Layer()
    stages = Stages([layer.double() for layer in layers])
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
    message = "LostRankError: lost rank 1 while sending 0F0→1F0: look there for the first error"
    assert first.exit_code == 1
    assert first.last_line.endswith(message)
    lost = "lost rank 1 while waiting for 1F0→2F0"
    does = ["is at 1F0 ", f"waits for 1F0→2F0 from rank 1, |{lost}, " if looks else f"{lost}, "]
    for rank, ended in enumerate(others, start=1):
        assert ended.exit_code == EXIT_CODE, ended
        assert re.search(f"^rota: rank {rank} ({does[rank - 1]})", ended.last_line), ended
        assert ended.last_line.endswith(f", and was ended because another rank failed: rank 0: {message}")


def test_rank_that_never_does_what_the_others_do(tmp_path: Path) -> None:
    waited = "the other ranks to reach the same step"
    waits = f"waits for {waited}.* in step 2"
    where = {0: waits, 1: "is outside .*hang", 2: waits}
    assert_one_report(
        hang_before(tmp_path, "step", where),
        "rota: no progress for 100 s, so all ranks end: rank 1 never reached what the others wait for",
        f"rank 0 waits for {waited} for ",
        "rank 1 is outside of the pipeline's calls (faulty_stages.py:",
        " in hang) for ",
        f"rank 2 waits for {waited} for ",
    )


@pytest.mark.faults
def test_rank_that_hangs_before_the_losses(tmp_path: Path) -> None:
    """It is still inside of the step, so it is the one that makes no progress."""
    losses = "waits for the other ranks' losses.* in step 2"
    assert_one_report(
        hang_before(tmp_path, "_engine.step_results.finish", {0: losses, 1: "hang", 2: losses}),
        "rota: no progress for 100 s, so all ranks end: rank 1 makes no progress",
        "rank 0 waits for the other ranks' losses for ",
        "rank 2 waits for the other ranks' losses for ",
        "(faulty_stages.py:",
    )


def hang_before(folder: Path, never: str, where: dict[int, str]) -> list[Ended]:
    return run_fresh(folder, NUM_RANKS, do_all_unless_rank_1, stages_with(Layer(), 1), plan_for(), never, folder, where)


def do_all_unless_rank_1(
    rank: int, stages: Stages, plan: Plan, never: str, folder: Path, where: dict[int, str]
) -> None:
    WatchClock(once_all_are(folder, rank, where))
    watchdog._LEAST_IDLE_S = math.inf  # rank 1's time may pass faster than that of those that wait for it
    with Pipeline(stages, plan, loss_fn, timeout_s=TIMEOUT_S) as pipeline:
        pipeline.step(*batch_of(4))
        if rank == 1:
            owner, _, method = never.rpartition(".")
            setattr(attrgetter(owner)(pipeline) if owner else pipeline, method, hang)
        pipeline.step(*batch_of(4))
        pipeline.clip_grad_norm_(1.0)
        pipeline.timeline()


def test_rank_that_makes_no_pipeline(tmp_path: Path) -> None:
    """The others have ten times as long there."""
    ended = run_fresh(tmp_path, NUM_RANKS, make_late, tmp_path, expected=(0, 2))
    assert ended[1].exit_code is None
    assert ended[0].exit_code == ended[2].exit_code == EXIT_CODE
    assert ended[0].stderr == ended[2].stderr
    for message in (
        "rota: no progress for 1000 s, so all ranks end: rank 1 never answered; it is stopped, dead, or without a",
        "rank 0 waits for the other ranks to make their pipelines for ",
        "s, before the first op",
        "rank 1 did not answer within 5 s",
    ):
        assert message in ended[0].stderr, ended


def make_late(rank: int, folder: Path) -> None:
    if rank == 1:
        time.sleep(1000)
    WatchClock(once_all_are(folder, rank, dict.fromkeys((0, 2), "waits for the other ranks to make their pipelines")))
    Pipeline(stages_with(Layer(), 1), plan_for(), loss_fn, timeout_s=TIMEOUT_S)


def test_all_ranks_that_are_stuck_outside_of_the_pipelines_calls(tmp_path: Path) -> None:
    ended = run_fresh(tmp_path, NUM_RANKS, wait_for_data, tmp_path)
    assert_one_report(
        ended,
        "rota: no progress for 1800 s, so all ranks end: all ranks are outside of the pipeline's calls",
        *(f"rank {rank} is outside of the pipeline's calls (faulty_stages.py:" for rank in range(NUM_RANKS)),
        " in hang) for ",
        "in step 1\n",
        "if they only need more time, give Pipeline a larger timeout_s: ranks may be outside of its calls for ten ",
    )


def wait_for_data(rank: int, folder: Path) -> None:
    WatchClock(once_all_are(folder, rank, dict.fromkeys(range(NUM_RANKS), "is outside .*hang")))
    with Pipeline(stages_with(Layer(), 1), plan_for(), loss_fn, timeout_s=TIMEOUT_S) as pipeline:
        pipeline.step(*batch_of(4))
        hang()


def work_alone_after_the_others(rank: int) -> None:
    """The last rank has a long way to go, after the others have closed their pipelines."""
    clock = WatchClock()
    with Pipeline(stages_with(Layer(), 1), plan_for(), loss_fn, timeout_s=TIMEOUT_S) as pipeline:
        pipeline.step(*batch_of(4))
        if rank == 2:
            while pipeline._engine.watchdog._roll_call.end() is None:
                time.sleep(0.01)
            clock.let_pass(2000)


def work_in_another_pipeline(rank: int) -> None:
    clock = WatchClock()
    with Pipeline(stages_with(Layer(), 1), plan_for(), loss_fn, timeout_s=TIMEOUT_S) as idle:
        clock.excludes = lambda watchdog, timed=idle._engine.watchdog: watchdog is not timed
        another = Pipeline(stages_with(Layer(), 1), plan_for(), loss_fn, timeout_s=TIMEOUT_S)
        with another, another.watching("what takes long"):
            clock.let_pass(2000)


@pytest.mark.parametrize("work", [work_alone_after_the_others, work_in_another_pipeline])
def test_rank_that_is_at_work_elsewhere_is_left_alone(tmp_path: Path, work: Callable[[int], None]) -> None:
    for ended in run_fresh(tmp_path, NUM_RANKS, work):
        assert (ended.exit_code, ended.stderr) == (0, "")


class Slow(Layer):
    """Each forward takes most of the limit."""

    clock: ClassVar[WatchClock]

    def forward(self, *values: Tensor) -> Tensor:
        self.clock.let_pass(round(0.6 * TIMEOUT_S))
        return super().forward(*values)


def take_time(rank: int, plan: Plan) -> None:
    """A step that takes longer than the timeout, a long rest after it, and a broken step, which ends the watchdog."""
    Slow.clock = clock = WatchClock()
    slow = Stages([Slow().double() for _ in range(NUM_RANKS)])
    broken = Stages([Fails(break_on_purpose, "forward", 0).double() for _ in range(NUM_RANKS)])
    with Pipeline(slow, plan, loss_fn, timeout_s=TIMEOUT_S) as pipeline:
        pipeline.step(*batch_of(plan.num_microbatches))
        clock.let_pass(round(2 * TIMEOUT_S))
    error, message = (ValueError, "on purpose") if rank == 0 else (PipelineError, "lost rank")
    with Pipeline(broken, plan, loss_fn, timeout_s=TIMEOUT_S) as pipeline, pytest.raises(error, match=message):
        pipeline.step(*batch_of(plan.num_microbatches))


def test_slow_steps_rests_and_failed_steps_do_not_wake_it(tmp_path: Path) -> None:
    for ended in run_fresh(tmp_path, NUM_RANKS, take_time, plan_for(num_microbatches=8)):
        assert ended.exit_code == 0, ended


class OnDevice:
    """A run whose device never ends what it has."""

    is_queued, at, num_reached, num_looks = True, None, 0, 0
    on_device = Doing(True, "waits on its device")

    def look(self) -> None:
        self.num_looks += 1

    def last(self) -> str:
        return "after 0F0"


def look_until_it_is_wrong(rank: int, how: str) -> None:
    """The device is asked in each interval until a rank fails, and the last resort is put off from then on too."""
    clock, run, timers = WatchClock(), OnDevice(), list[str]()
    faulthandler.dump_traceback_later = lambda *_, **__: timers.append("put off")
    faulthandler.cancel_dump_traceback_later = lambda: timers.append("cancelled")
    watched = watchdog.Watchdog(TIMEOUT_S, watchdog.Watched(["rank 0", "rank 1"], run))
    clock.let_pass(3)
    assert (run.num_looks, timers) == (3, ["put off"] * 3)
    if how == "here":
        watched.report(ValueError())
    if how == "elsewhere":
        watched._roll_call.publish("failed", "rank 1: ValueError")
    clock.let_pass(1)
    assert (run.num_looks, timers) == (3 if how else 4, ["put off"] * 4)
    if how == "elsewhere":
        clock.let_pass(1000)
    watched.close()
    assert timers[-1] == ("put off" if how else "cancelled")


@pytest.mark.parametrize(
    ("how", "exit_code", "message"),
    [
        ("", 0, ""),
        ("here", 0, ""),
        (
            "elsewhere",
            EXIT_CODE,
            r"rota: rank 0 waits on its device \(watch_clock.py:.+\), and was ended because another rank failed: "
            "rank 1: ValueError",
        ),
    ],
)
def test_a_device_is_not_asked_once_a_rank_has_failed(tmp_path: Path, how: str, exit_code: int, message: str) -> None:
    (ended,) = run_fresh(tmp_path, 1, look_until_it_is_wrong, how)
    assert ended.exit_code == exit_code, ended
    assert re.fullmatch(message, ended.stderr), ended


def look_at_a_stuck_device(rank: int) -> None:
    watchdog._LAST_RESORT_S = 1.5
    run = OnDevice()
    run.look = lambda: ctypes.PyDLL(None).sleep(1000)  # type: ignore[method-assign]
    watchdog.Watchdog(0.5, watchdog.Watched(["rank 0", "rank 1"], run))
    hang()


def test_a_query_that_hangs_with_the_gil_ends_the_process(tmp_path: Path) -> None:
    (ended,) = run_fresh(tmp_path, 1, look_at_a_stuck_device)
    assert ended.exit_code == 1, ended
    for text in ("Timeout (0:00:02", "in look_at_a_stuck_device", "in _look", "in hang"):
        assert text in ended.stderr, ended
