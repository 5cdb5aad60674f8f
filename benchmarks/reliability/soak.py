"""A training that is killed, asked to end and moved to other numbers of ranks again and again, for minutes."""

from __future__ import annotations

import argparse
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from trainings import (
    NUM_MICROBATCHES,
    PATIENCE_S,
    Wrong,
    await_done,
    compare,
    done_in,
    last_words,
    leftovers,
    plan_of,
    prepare,
    rota_run,
)

from rota import Cluster, Costs, Plan, place
from rota.core.text import count_text
from rota.schedules import gpipe

NUM_STAGES, SAVE_EVERY = 4, 20
OPTIONS = {"num_layers": 8, "width": 16, "rows": 16, "num_workers": 1, "save_every": SAVE_EVERY}
OPTIONS |= {"asynchronous": True, "pause_s": 0.02}
KILL_EVERY_S = 5.0  # on average
_KILLED = "rota run killed"


def plan_on(num_ranks: int) -> Plan:
    """The same stages on at most as many ranks: dropout depends on the stage."""
    ranks = [stage * num_ranks // NUM_STAGES for stage in range(NUM_STAGES)]
    return gpipe(place(Costs.uniform(NUM_STAGES, 100, 200), Cluster.uniform(num_ranks), ranks), NUM_MICROBATCHES)


@dataclass
class Soak:
    """One training in `folder`, and what it has been through."""

    folder: Path
    generator: random.Random
    seen: Counter[str] = field(default_factory=Counter)
    may_be_done_again: int = 0

    def train(self, until_s: float) -> None:
        """One command, some of whose processes are killed; then it is ended."""
        num_ranks = self.generator.choice([1, 2, 3, 4, 4])
        prepare(self.folder, plan_on(num_ranks), **OPTIONS)
        num_before = len(done_in(self.folder))
        command = rota_run(self.folder)
        try:
            self.seen[f"commands on {count_text(num_ranks, 'rank')}"] += 1
            for _ in range(self.generator.randrange(12)):
                if time.monotonic() < until_s:
                    time.sleep(self.generator.expovariate(1 / KILL_EVERY_S))
                    self.kill(command.pid)
            # By the second new step all ranks have looked at `should_stop`.
            num_now = max(num_before, len(done_in(self.folder)))
            await_done(self.folder, lambda done: len(done) >= num_now + 3, command)
            how = self.end(command)
        finally:
            command.kill()
            command.wait()
        self.seen[f"ended: {how}"] += 1
        left = leftovers(self.folder)
        if how == _KILLED:  # while it saved, perhaps: the next command removes what is not whole
            left = [path for path in left if not path.endswith(".partial")]
        if left:
            raise Wrong(f"left behind by a command that was ended by {how}: {', '.join(left)}")

    def kill(self, command: int) -> None:
        """One rank, or two at once: now, or in the middle of a checkpoint."""
        what = self.generator.choice(["a rank"] * 6 + ["two ranks", "a rank while checkpointing"])
        if "checkpointing" in what and not self.await_checkpoint():
            what = "a rank"
        ranks = ranks_of(command)
        self.generator.shuffle(ranks)
        victims = ranks[: 2 if what == "two ranks" else 1]
        for victim in victims:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        if victims:
            self.seen[f"killed: {what}"] += 1
            self.may_be_done_again += len(victims)
        deadline = time.monotonic() + PATIENCE_S
        while {*victims} & {*ranks_of(command)}:  # or the next signal would go to ranks that end anyway
            if time.monotonic() > deadline:
                raise Wrong(f"a killed rank is still there: {last_words(self.folder)}")
            time.sleep(0.01)

    def await_checkpoint(self) -> bool:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            if any((self.folder / "run").glob("*.partial")):
                return True
            time.sleep(0.001)
        return False

    def end(self, command: subprocess.Popen[bytes]) -> str:
        """By one of two signals, to the command or to a rank, or by killing it; returns which."""
        if self.generator.random() < 0.2:
            command.kill()
            command.wait()
            self.may_be_done_again += 2 * SAVE_EVERY  # the newest checkpoint may not be whole yet
            return _KILLED
        number = self.generator.choice([signal.SIGTERM, signal.SIGUSR1])
        ranks = ranks_of(command.pid)
        to_rank = self.generator.random() < 0.3 and bool(ranks)
        os.kill(self.generator.choice(ranks) if to_rank else command.pid, number)
        code = command.wait(PATIENCE_S)
        if code != (143 if number is signal.SIGTERM and not to_rank else 0):
            raise Wrong(f"{number.name} ended `rota run` with {code}: {last_words(self.folder)}")
        return f"{number.name} to {'a rank' if to_rank else 'rota run'}"

    def compare(self) -> tuple[int, int]:
        """Every loss against an undisturbed run's; steps, and how many were done again."""
        found = done_in(self.folder)
        quiet = self.folder / "undisturbed"
        num_steps = max(done.step for done in found) + 1
        options = {**OPTIONS, "pause_s": 0.0, "save_every": None, "num_steps": num_steps}
        prepare(quiet, plan_of(NUM_STAGES), **options)
        if code := rota_run(quiet).wait():
            raise Wrong(f"the undisturbed run ended with {code}: {last_words(quiet)}")
        num_again = compare(found, done_in(quiet))
        if num_again > self.may_be_done_again:
            raise Wrong(f"{num_again} steps were done again, more than {self.may_be_done_again}")
        verify = [sys.executable, "-m", "rota", "checkpoint", "verify", "run"]
        subprocess.run(verify, cwd=self.folder, check=True, stdout=subprocess.DEVNULL)
        return num_steps, num_again


def ranks_of(command: int) -> list[int]:
    """The processes that were forked from the command, whose command line they have."""
    children = Path(f"/proc/{command}/task/{command}/children")
    found = []
    with suppress(OSError):
        of_command = Path(f"/proc/{command}/cmdline").read_bytes()
        for child in map(int, children.read_text().split()):
            with suppress(OSError):
                if Path(f"/proc/{child}/cmdline").read_bytes() == of_command:
                    found.append(child)
    return found


def left_in_shared_memory(before: set[str]) -> set[str]:
    """What is new in /dev/shm, and no living process has mapped: those of the training have all ended."""
    new = {*os.listdir("/dev/shm")} - before
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            text = maps.read_text()
            new = {name for name in new if f"/dev/shm/{name}" not in text}
    return new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    shared_before = {*os.listdir("/dev/shm")}
    with tempfile.TemporaryDirectory(prefix="rota-soak-") as name:
        soak = Soak(Path(name), random.Random(options.seed))
        until_s = time.monotonic() + 60 * options.minutes
        while time.monotonic() < until_s:
            soak.train(until_s)
            print(", ".join(f"{what}: {count}" for what, count in sorted(soak.seen.items())), flush=True)
        num_steps, num_again = soak.compare()
    left = left_in_shared_memory(shared_before)
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores\n"
        f"{options.minutes:g} minutes, seed {options.seed}: {num_steps:,} steps and {num_again:,} that were done "
        f"again, all with the undisturbed losses and samples; left in /dev/shm: "
        f"{', '.join(sorted(left)) or 'nothing'}.\n\n"
        "| what happened | times |\n|---|---|"
    )
    for what, count in sorted(soak.seen.items()):
        print(f"| {what} | {count} |")


if __name__ == "__main__":
    main()
