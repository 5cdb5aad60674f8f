"""What is said when a run does not go on, and when that is."""

import json
import math
import threading
import time

import pytest

from rota import Cluster, Costs, PipelineError, place, simulate
from rota.runtime.faults.hang_report import (
    Status,
    compose,
    decoded,
    frames_of,
    is_in_a_collective,
    place as place_of,
    printable,
    reason_of,
)
from rota.runtime.faults.roll_call import End
from rota.runtime.faults.watchdog import limit_s
from rota.schedules import gpipe

NAMES = [f"rank {rank}" for rank in range(3)]
WAITS = Status("waits", "waits for 1B1→0B1 from rank 1", 60.25, "after 0F3 in step 5")
BUSY = Status("busy", "is at 1F2 (model.py:12 in forward)", 61, "after 1F1 in step 5")
OUTSIDE = Status("outside", "is outside of the pipeline's calls (train.py:8 in load)", 75, "after 1F1 in step 4")


@pytest.mark.parametrize(
    "text",
    [
        *("", "[" * 99999, "{}", "[[]]", '["waits", 1, 2.0, "x"]', '["other", "x", 2.0, "x"]'),
        *('["rank 1"]', '[1, "rank 1"]', '["rank 1", true]'),
    ],
)
def test_what_is_no_standing_and_no_end_is_no_answer(text: str) -> None:
    """Under torchrun anybody who reaches the store can write there."""
    assert decoded(text, Status) is decoded(text, End) is None
    assert decoded(json.dumps(BUSY), Status) == BUSY
    assert decoded(json.dumps(End("rank 1", 3)), End) == End("rank 1", 3)


def test_a_report_cannot_move_the_cursor() -> None:
    assert printable("rota: \x1b[2J\nrank 0 é→") == "rota: \\x1b[2J\nrank 0 é→"
    assert reason_of(compose(NAMES, {0: WAITS, 1: BUSY, 2: WAITS}, 60, 5)) == "rank 1 makes no progress"


@pytest.mark.parametrize(
    ("statuses", "reason"),
    [
        ({0: WAITS, 1: BUSY, 2: WAITS}, "rank 1 makes no progress"),
        ({0: BUSY, 1: BUSY, 2: WAITS}, "rank 0, rank 1 make no progress"),
        ({0: BUSY, 1: OUTSIDE, 2: WAITS}, "rank 1 never reached what the others wait for"),
        ({0: WAITS, 2: OUTSIDE}, "rank 1 never answered; it is stopped, dead, or without a pipeline"),
        ({2: WAITS}, "rank 0, rank 1 never answered; they are stopped, dead, or without a pipeline"),
        ({0: WAITS, 1: WAITS, 2: WAITS}, "all wait for each other; check that all make the same calls"),
    ],
)
def test_whom_the_others_wait_for(statuses: dict[int, Status], reason: str) -> None:
    first, *lines, remedy = compose(NAMES, statuses, 60, 5).splitlines()
    assert first.startswith(f"rota: no progress for 60 s, so all ranks end: {reason}")
    for rank, line in enumerate(lines):
        status = statuses.get(rank)
        told = f"{status.words} for {status.duration_s:.1f} s, {status.last}" if status else "did not answer within 5 s"
        assert line == f"    rank {rank} {told}"
    assert remedy.strip() == "if it only needs more time, give Pipeline a larger timeout_s"


def test_many_that_do_not_answer_are_counted() -> None:
    names = [f"rank {rank}" for rank in range(100)]
    first = compose(names, {0: WAITS}, 60, 5).splitlines()[0]
    assert "rank 1, rank 2, rank 3, rank 4, rank 5, rank 6, rank 7, rank 8 and 91 others never answered" in first


@pytest.mark.parametrize("timeout_s", [0, -1, math.nan, "60", True])
def test_a_limit_that_is_none_is_refused(timeout_s: object) -> None:
    plan = gpipe(place(Costs.uniform(2), Cluster.uniform(2)), 2)
    with pytest.raises(PipelineError, match=f"timeout_s={timeout_s!r}; give seconds above 0"):
        limit_s(timeout_s, plan)  # type: ignore[arg-type]


def test_the_limit_comes_from_the_plan() -> None:
    short, long = (gpipe(place(Costs.uniform(2, us), Cluster.uniform(2)), 2) for us in (10, 2_000_000))
    assert limit_s(None, short) == 60
    assert limit_s(None, long) == 20 * simulate(long).makespan_us / 1e6 > 60
    assert limit_s(3, long) == 3
    assert limit_s(math.inf, long) == math.inf


def test_where_a_thread_is() -> None:
    begun, over = threading.Event(), threading.Event()

    def dawdle() -> None:
        begun.set()
        over.wait()

    thread = threading.Thread(target=dawdle)
    thread.start()
    begun.wait()
    while "wait" not in {frame.f_code.co_name for frame in frames_of(thread.ident)}:
        time.sleep(0.01)
    frames = frames_of(thread.ident)
    over.set()
    thread.join()
    assert place_of(frames).startswith("test_hang_report.py:")
    assert place_of(frames).endswith(" in dawdle")
    assert not is_in_a_collective(frames)
    assert frames_of(thread.ident) == frames_of(None) == []
    assert place_of([]) == ""
