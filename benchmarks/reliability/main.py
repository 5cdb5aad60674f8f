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

from rota import Cluster, Costs, place, replan
from rota.runtime.checkpoints.lock import LOCK
from rota.schedules import one_f_one_b
from rota.units import count_text

HERE = Path(__file__).parent
NUM_STAGES, NUM_MICROBATCHES, PAUSE_S = 4, 4, 0.02
ENOUGH_STEPS = 10**9
PATIENCE_S = 120.0  # for a start, a step or an end on a busy machine


class Wrong(Exception):
    """What must not happen has happened."""


@dataclass
class Soak:
    """One training in `folder`, and what it has been through."""

    folder: Path
    generator: random.Random
    seen: Counter[str] = field(default_factory=Counter)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "TMPDIR": str(self.folder / "tmp")}

    def command(self, num_ranks: int, *arguments: str) -> list[str]:
        options = ["--max-restarts", "1000", f"plan{num_ranks}.json", str(HERE / "train.py")]
        return [sys.executable, "-m", "rota", "run", *options, *arguments]

    def train(self, until: float) -> None:
        """One command: some ranks are killed, then all are asked to end."""
        num_ranks = self.generator.choice([1, 2, 3, 4, 4])
        with (self.folder / "stderr").open("a") as stderr:
            launcher = subprocess.Popen(
                self.command(num_ranks, str(ENOUGH_STEPS), str(PAUSE_S)),
                cwd=self.folder,
                env=self.environment,
                stderr=stderr,
            )
        try:
            self.seen[f"commands on {count_text(num_ranks, 'rank')}"] += 1
            for _ in range(self.generator.randrange(4)):
                if time.monotonic() < until:
                    self.kill_one(launcher)
            self.end(launcher)
        finally:
            launcher.kill()
            launcher.wait()

    def kill_one(self, launcher: subprocess.Popen[bytes]) -> None:
        """A rank, at any moment from its start on, or in the middle of a checkpoint."""
        if self.generator.random() < 0.3:
            time.sleep(self.generator.uniform(0, 5))
            what = "kills at any moment"
        else:
            self.await_steps(launcher, self.generator.randrange(1, 60))
            what = "kills between and in steps"
            if self.generator.random() < 0.5 and self.await_checkpoint():
                what = "kills while checkpointing"
        ranks = ranks_of(launcher.pid)
        if ranks:
            with suppress(ProcessLookupError):
                os.kill(self.generator.choice(ranks), signal.SIGKILL)
                self.seen[what] += 1
        deadline = time.monotonic() + PATIENCE_S
        while {*ranks} & {*ranks_of(launcher.pid)}:  # or the next signal would go to ranks that end anyway
            if time.monotonic() > deadline:
                raise Wrong(f"not all ranks ended after one was killed: {self.last_words()}")
            time.sleep(0.01)

    def await_steps(self, launcher: subprocess.Popen[bytes], num_steps: int) -> None:
        deadline, goal = time.monotonic() + PATIENCE_S, self.size() + 30 * num_steps  # some 30 bytes a step
        while self.size() < goal:
            if launcher.poll() is not None or time.monotonic() > deadline:
                raise Wrong(f"no progress for {PATIENCE_S} s, or ended with {launcher.returncode}: {self.last_words()}")
            time.sleep(0.01)

    def await_checkpoint(self) -> bool:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            if any((self.folder / "run").glob("*.partial")):
                return True
            time.sleep(0.001)
        return False

    def end(self, launcher: subprocess.Popen[bytes]) -> None:
        """By one of the two signals, to the launcher or to a rank; then nothing may be left."""
        self.await_steps(launcher, 2)  # by the second all ranks have looked at `should_stop`
        number = self.generator.choice([signal.SIGTERM, signal.SIGUSR1])
        ranks = ranks_of(launcher.pid)
        to_rank = self.generator.random() < 0.3 and bool(ranks)
        os.kill(self.generator.choice(ranks) if to_rank else launcher.pid, number)
        self.seen[f"{number.name} to {'a rank' if to_rank else 'rota run'}"] += 1
        code = launcher.wait(PATIENCE_S)
        if code != (143 if number is signal.SIGTERM and not to_rank else 0):
            raise Wrong(f"{number.name} ended `rota run` with {code}: {self.last_words()}")
        if left := leftovers(self.folder):
            raise Wrong(f"left behind: {', '.join(left)}")

    def size(self) -> int:
        file = self.folder / "losses"
        return file.stat().st_size if file.exists() else 0

    def last_words(self) -> str:
        return (self.folder / "stderr").read_text()[-2000:]

    def losses(self, name: str) -> list[tuple[int, str]]:
        lines = (self.folder / name).read_text().splitlines()
        return [(int(step), loss) for step, loss, _ in (line.split() for line in lines)]

    def compare(self) -> tuple[int, int]:
        """Every loss there was against an undisturbed run; steps, and how many were done more than once."""
        found = self.losses("losses")
        num_steps = max(step for step, _ in found) + 1
        (self.folder / "losses").rename(self.folder / "disturbed")
        command = self.command(NUM_STAGES, str(num_steps))
        subprocess.run(command, cwd=self.folder, env=self.environment, check=True)
        expected = dict(self.losses("losses"))
        if {step for step, _ in found} != expected.keys():
            raise Wrong("steps are missing")
        for step, loss in found:
            if loss != expected[step]:
                raise Wrong(f"step {step} had the loss {float.fromhex(loss)!r}, not {float.fromhex(expected[step])!r}")
        verify = [sys.executable, "-m", "rota", "checkpoint", "verify", "run"]
        subprocess.run(verify, cwd=self.folder, check=True, stdout=subprocess.DEVNULL)
        return num_steps, len(found) - num_steps


def ranks_of(launcher: int) -> list[int]:
    """The processes that were forked from the stand-by, which is older and has their command line."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    found = []
    for child in children.read_text().split() if children.exists() else ():
        with suppress(OSError):
            if b"stand_by_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found[1:]


def leftovers(folder: Path) -> list[str]:
    """Processes, unfinished checkpoints and temporary folders."""
    found = [str(path) for path in (folder / "run").iterdir() if path.suffix and path.name != LOCK]
    found += [str(path) for path in (folder / "tmp").glob("rota-*")]
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cwd").readlink() == folder:
                found.append(f"process {process.name} ({(process / 'cmdline').read_text()[:80]!r})")
    return found


README = """# A training that goes on whatever happens

**Claim.** Ranks are killed at any moment, also while a checkpoint is written; the training is asked to end, and goes on
under a new command, also on another number of ranks. The loss of every step, of those that were done again too, equals
the undisturbed run's to the last bit (float64, dropout included), and no process, no unfinished checkpoint and no
temporary folder is left.

**Command.** `make soak`, or `.venv/bin/python benchmarks/reliability/main.py [--minutes 30] [--seed 0]`

`train.py` saves every 20 steps, in the background, and looks at `pipeline.should_stop`. `main.py` starts it by
`rota run --max-restarts`, kills ranks by SIGKILL, sends SIGTERM or SIGUSR1 to `rota run` or to one rank, looks for what
is left, and starts it again on 1 to 4 ranks, with `replan`'s plan for them.

**Environment.** {environment}.

**Result.** {minutes:g} minutes, seed {seed}: {result}

| what happened | times |
|---|---|
{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write the result into README.md")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="rota-soak-") as name:
        soak = Soak(Path(name), random.Random(options.seed))
        (soak.folder / "tmp").mkdir()
        plan = one_f_one_b(place(Costs.uniform(NUM_STAGES, 100, 200), Cluster.uniform(NUM_STAGES)), NUM_MICROBATCHES)
        for num_ranks in range(1, NUM_STAGES + 1):
            (soak.folder / f"plan{num_ranks}.json").write_text(replan(plan, num_ranks).to_json())
        until = time.monotonic() + 60 * options.minutes
        while time.monotonic() < until:
            soak.train(until)
            print(", ".join(f"{what}: {count}" for what, count in sorted(soak.seen.items())), flush=True)
        num_steps, num_again = soak.compare()
    result = (
        f"{num_steps:,} steps and {num_again:,} that were done again, all with the undisturbed losses; nothing left."
    )
    table = "\n".join(f"| {what} | {n} |" for what, n in sorted(soak.seen.items()))
    where = (
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores"
    )
    text = README.format(environment=where, minutes=options.minutes, seed=options.seed, result=result, table=table)
    print(result)
    if options.write:
        (HERE / "README.md").write_text(text)


if __name__ == "__main__":
    main()
