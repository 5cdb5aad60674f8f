"""A training in a folder: how it is started, what it has done, and what must be true of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rota import Cluster, Costs, Plan, place
from rota.schedules import one_f_one_b

TRAIN = Path(__file__).parent / "train.py"
NUM_MICROBATCHES = 4
PATIENCE_S = 300.0  # for a start, a step or an end on a busy machine


class Wrong(Exception):
    """What must not happen has happened."""


class Done(NamedTuple):
    """A step as the first process wrote it: its loss to the last bit, its samples, and when it was done (monotonic)."""

    step: int
    loss: str
    samples: str
    at_s: float


def plan_of(num_ranks: int) -> Plan:
    """1F1B."""
    return one_f_one_b(place(Costs.uniform(num_ranks, 100, 200), Cluster.uniform(num_ranks)), NUM_MICROBATCHES)


def prepare(folder: Path, plan: Plan, deaths: Sequence[tuple[int, int, str]] = (), **options: Any) -> None:
    """Write the files that the training reads."""
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(plan.to_json())
    (folder / "options.json").write_text(json.dumps(options))
    (folder / "deaths.json").write_text(json.dumps([*deaths]))


def environment(folder: Path) -> dict[str, str]:
    """That of a command in the folder, by which its processes are known."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}  # which PyTorch keeps in TMPDIR otherwise
    return {**os.environ, **cache, "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"}


def rota_run(
    folder: Path, dp: int = 1, stderr: int | None = None, options: Sequence[str] = (), inside: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """`rota run` with as many restarts as it needs; `stderr`: as for `Popen`, None for a file.

    `options` are of `rota run`; `inside` is a command that runs another one.
    """
    mesh = ["--mesh", f"pp={Plan.from_json((folder / 'plan.json').read_text()).num_ranks},dp={dp}"] if dp > 1 else []
    module = ["rota", "run", *mesh, *options, "--max-restarts", "1000", "plan.json", str(TRAIN)]
    return _start(folder, module, stderr, inside)


def torchrun(folder: Path, num_processes: int) -> subprocess.Popen[bytes]:
    """The same script, by PyTorch's own launcher."""
    options = ["--standalone", "--nproc-per-node", str(num_processes), "--max-restarts", "1000"]
    return _start(folder, ["torch.distributed.run", *options, "--monitor-interval", "0.1", str(TRAIN)], None)


def _start(
    folder: Path, module: Sequence[str], stderr: int | None, inside: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    with (folder / "stderr").open("a") as file:
        return subprocess.Popen(
            [*inside, sys.executable, "-m", *module],
            cwd=folder,
            env=environment(folder),
            stderr=file if stderr is None else stderr,
        )


def done_in(folder: Path) -> list[Done]:
    """All steps, in the order in which they were done."""
    file = folder / "losses"
    rows = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    return [Done(int(step), loss, samples, float(at)) for step, loss, samples, at in rows]


def await_done(folder: Path, is_there: Callable[[list[Done]], bool], process: subprocess.Popen[bytes]) -> list[Done]:
    """Wait for steps. Raises Wrong if there is no progress, or the command has ended."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_there(found := done_in(folder)):
        if process.poll() is not None or time.monotonic() > deadline:
            raise Wrong(f"no progress for {PATIENCE_S:g} s, or ended with {process.returncode}: {last_words(folder)}")
        time.sleep(0.005)
    return found


def last_words(folder: Path) -> str:
    """The end of standard error."""
    return (folder / "stderr").read_text()[-2000:]


def compare(found: Sequence[Done], undisturbed: Sequence[Done]) -> int:
    """How many steps were done again. Raises Wrong unless all steps are there, with the same losses and samples."""
    expected = {done.step: (done.loss, done.samples) for done in undisturbed}
    last = max(done.step for done in found)
    if missing := {*range(last + 1)} - {done.step for done in found}:
        raise Wrong(f"steps {sorted(missing)} are missing")
    for done in found:
        if (done.loss, done.samples) != expected[done.step]:
            raise Wrong(f"step {done.step} had {done.loss}, {done.samples}, not {expected[done.step]}")
    return len(found) - (last + 1)


def processes_of(folder: Path) -> list[int]:
    """All that were started in the folder, or by those that were, wherever they work."""
    mark, found = f"TMPDIR={folder / 'tmp'}\0".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def leftovers(folder: Path) -> list[str]:
    """Processes, unfinished checkpoints and temporary files but torchrun's. What was killed has a moment to end."""
    deadline = time.monotonic() + 10
    while (processes := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    found = [f"process {process}" for process in processes]
    found += [str(path) for path in (folder / "run").glob("*.partial")]
    return found + [str(path) for path in (folder / "tmp").iterdir() if not path.name.startswith("torchelastic_")]
