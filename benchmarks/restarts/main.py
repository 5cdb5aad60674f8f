"""How long a training stands still when a rank is killed: from the kill to the end of the next new step.

`reliability` kills for minutes and looks for what is lost; this measures. Each kill comes at a random instant, so in
proportion to how long each part of a step takes. All losses are compared with an undisturbed run's.
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

TRAIN = Path(__file__).parent / "train.py"
NUM_RANKS, NUM_MICROBATCHES = 4, 4
PATIENCE_S = 120.0


class Done(NamedTuple):
    """A step as the first rank wrote it: its number, its loss to the last bit, and when it was done (monotonic)."""

    step: int
    loss: str
    at_s: float


def done_in(folder: Path) -> list[Done]:
    file = folder / "losses"
    lines = file.read_text().splitlines() if file.exists() else []
    rows = (line.split() for line in lines if len(line.split()) == 3)
    return [Done(int(step), loss, float(at)) for step, loss, at in rows]


def await_steps(folder: Path, is_there: Callable[[list[Done]], bool], process: subprocess.Popen[bytes]) -> list[Done]:
    deadline = time.monotonic() + PATIENCE_S
    while not is_there(found := done_in(folder)):
        if process.poll() is not None or time.monotonic() > deadline:
            words = (folder / "stderr").read_text()[-2000:]
            raise SystemExit(f"no progress for {PATIENCE_S:g} s, or ended with {process.returncode}: {words}")
        time.sleep(0.005)
    return found


def ranks_in(folder: Path) -> list[int]:
    """The process ids of the ranks, which write them beside their losses."""
    return [int(path.read_text()) for path in sorted(folder.glob("pid-*")) if path.read_text()]


def command_of(starter: str, width: int, rows: int) -> list[str]:
    arguments = [str(TRAIN), str(width), str(rows)]
    if starter == "torchrun":
        options = ["--standalone", "--nproc-per-node", str(NUM_RANKS), "--max-restarts", "1000"]
        return [sys.executable, "-m", "torch.distributed.run", *options, "--monitor-interval", "0.1", *arguments]
    return [sys.executable, "-m", "rota", "run", "--max-restarts", "1000", "plan.json", *arguments]


def standstills(starter: str, width: int, rows: int, num_kills: int, seed: int) -> tuple[list[float], int]:
    """For each kill the seconds until the next new step is done; and how many steps were done again in all."""
    generator, seconds = random.Random(seed), []
    with tempfile.TemporaryDirectory(prefix="rota-restarts-") as name:
        folder = Path(name)
        with training(starter, width, rows, folder) as process:
            for _ in range(num_kills):
                seconds.append(one_kill(folder, process, generator))
            found = done_in(folder)
        (folder / "quiet").mkdir()
        with training("rota run", width, rows, folder / "quiet") as process:
            most = max(done.step for done in found)
            undisturbed = await_steps(folder / "quiet", lambda done: bool(done) and done[-1].step >= most, process)
    expected = {done.step: done.loss for done in undisturbed}
    if wrong := {done.step for done in found if done.loss != expected[done.step]}:
        raise SystemExit(f"steps {sorted(wrong)} have other losses than the undisturbed run's")
    if missing := {*range(most + 1)} - {done.step for done in found}:
        raise SystemExit(f"steps {sorted(missing)} are missing")
    return seconds, len(found) - len({done.step for done in found})


@contextmanager
def training(starter: str, width: int, rows: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A training in `folder`, which is ended in the end."""
    plan = one_f_one_b(place(Costs.uniform(NUM_RANKS, 100, 200), Cluster.uniform(NUM_RANKS)), NUM_MICROBATCHES)
    (folder / "plan.json").write_text(plan.to_json())
    with (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(command_of(starter, width, rows), cwd=folder, stderr=stderr)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def one_kill(folder: Path, process: subprocess.Popen[bytes], generator: random.Random) -> float:
    """Kill one rank after a few more steps; returns the seconds until a step is done that was not done before."""
    num_before = len(done_in(folder))
    found = await_steps(folder, lambda done: len(done) >= num_before + 5, process)
    time.sleep(generator.uniform(0, 2 * (found[-1].at_s - found[-2].at_s)))
    killed_at_s = time.monotonic()
    os.kill(generator.choice(ranks_in(folder)), signal.SIGKILL)
    time.sleep(0.05)  # by now the others have ended, or wait for the one that was killed
    newest = max(done.step for done in done_in(folder))
    found = await_steps(folder, lambda done: done[-1].step > newest, process)
    return next(done.at_s for done in found if done.step > newest) - killed_at_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--torchrun-kills", type=int, default=3)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, {NUM_RANKS} ranks")
    for starter, num_kills in (("rota run", options.kills), ("torchrun", options.torchrun_kills)):
        if not num_kills:
            continue
        seconds, num_again = standstills(starter, options.width, options.rows, num_kills, options.seed)
        print(
            f"{starter}: {num_kills} kills, next new step after {statistics.median(seconds):.2f} s (median), "
            f"{max(seconds):.2f} s (worst); {num_again} steps were done again",
            flush=True,
        )


if __name__ == "__main__":
    main()
