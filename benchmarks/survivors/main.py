"""How long a training on replicas stands still when a rank is lost for good, and when a new one joins.

Ranks are killed at random instants, each only when all are there. All losses are compared with an undisturbed run's.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from rota import Cluster, Costs, place
from rota.schedules import one_f_one_b
from rota.search import find_backups

TRAIN = Path(__file__).parent / "train.py"
NUM_RANKS, NUM_REPLICAS, NUM_MICROBATCHES = 2, 2, 4
PATIENCE_S, REJOIN_AFTER_S = 120.0, 1.0


class Done(NamedTuple):
    """A step as the first process wrote it: number, loss, ranks of its plan, and when it was done (monotonic)."""

    step: int
    loss: float
    num_ranks: int
    at_s: float


def done_in(folder: Path) -> list[Done]:
    file = folder / "losses"
    lines = file.read_text().splitlines() if file.exists() else []
    rows = (line.split() for line in lines if len(line.split()) == 4)
    return [Done(int(step), float(loss), int(num_ranks), float(at)) for step, loss, num_ranks, at in rows]


def await_steps(folder: Path, is_there: Callable[[list[Done]], bool], process: subprocess.Popen[bytes]) -> list[Done]:
    deadline = time.monotonic() + PATIENCE_S
    while not is_there(found := done_in(folder)):
        if process.poll() is not None or time.monotonic() > deadline:
            words = (folder / "stderr").read_text()[-2000:]
            raise SystemExit(f"no progress for {PATIENCE_S:g} s, or ended with {process.returncode}: {words}")
        time.sleep(0.005)
    return found


@contextmanager
def training(folder: Path, width: int, rows: int) -> Iterator[subprocess.Popen[bytes]]:
    """A training in `folder`, which is ended in the end."""
    plan = one_f_one_b(place(Costs.uniform(NUM_RANKS, 100, 200), Cluster.uniform(NUM_RANKS)), NUM_MICROBATCHES)
    (folder / "plan.json").write_text(plan.to_json())
    (folder / "backups.json").write_text(find_backups(plan, NUM_REPLICAS, time_limit_s=2).to_json())
    options = ["--backups", "backups.json", "--rejoin-after", str(REJOIN_AFTER_S)]
    command = [sys.executable, "-m", "rota", "run", *options, "plan.json", str(TRAIN), str(width), str(rows)]
    with (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(command, cwd=folder, stderr=stderr)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def one_loss(folder: Path, process: subprocess.Popen[bytes], generator: random.Random) -> tuple[float, float]:
    """Kill one rank; returns the seconds from the kill, and from the last step without it, to the next new step."""
    num_before = len(done_in(folder))
    found = await_steps(folder, lambda done: len(done) >= num_before + 5 and done[-1].num_ranks == NUM_RANKS, process)
    time.sleep(generator.uniform(0, 2 * (found[-1].at_s - found[-2].at_s)))
    victim = generator.randrange(NUM_RANKS * NUM_REPLICAS)
    killed_at_s = time.monotonic()
    os.kill(int((folder / f"pid-{victim}").read_text()), signal.SIGKILL)
    time.sleep(0.05)  # by now the others have ended, or wait for the one that was killed
    newest = max(done.step for done in done_in(folder))
    found = await_steps(folder, lambda done: done[-1].step > newest, process)
    lost_s = next(done.at_s for done in found if done.step > newest) - killed_at_s
    num_done = len(found)
    found = await_steps(folder, lambda done: done[-1].num_ranks == NUM_RANKS and len(done) > num_done, process)
    joined = next(i for i in range(num_done, len(found)) if found[i].num_ranks == NUM_RANKS)
    return lost_s, found[joined].at_s - found[joined - 1].at_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    generator = random.Random(options.seed)
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, 2 replicas of 2 ranks")
    with tempfile.TemporaryDirectory(prefix="rota-survivors-") as name:
        folder, quiet = Path(name), Path(name, "quiet")
        with training(folder, options.width, options.rows) as process:
            seconds = [one_loss(folder, process, generator) for _ in range(options.kills)]
            found = done_in(folder)
        quiet.mkdir()
        most = max(done.step for done in found)
        with training(quiet, options.width, options.rows) as process:
            undisturbed = await_steps(quiet, lambda done: bool(done) and done[-1].step >= most, process)
    expected = {done.step: done.loss for done in undisturbed}
    if missing := {*range(most + 1)} - {done.step for done in found}:
        raise SystemExit(f"steps {sorted(missing)} are missing")
    furthest = max(abs(done.loss - expected[done.step]) for done in found)
    for what, column in (("after a loss, next new step", 0), ("a rank joins, between two steps", 1)):
        of = [pair[column] for pair in seconds]
        print(f"{what}: {statistics.median(of):.2f} s (median), {max(of):.2f} s (worst) of {len(of)}")
    without = sum(done.num_ranks != NUM_RANKS for done in found)
    print(
        f"{most + 1} steps, {without} of them without a rank; 0 lost, {len(found) - most - 1} done again; "
        f"losses differ from the undisturbed run's by at most {furthest:.1e}",
        flush=True,
    )


if __name__ == "__main__":
    main()
