"""How long a training stands still when processes are killed, in each phase of a step and in each role.

A process kills itself in its phase, so the time of its death is known. All losses and samples are compared with an
undisturbed run's. `soak.py` kills at random instants for minutes.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from deaths import AT_ONCE, EVERY, PHASES, RECOVERY, spread
from safetensors.torch import save_file
from train import Options, model_of, samples_of
from trainings import Done, await_done, compare, done_in, leftovers, plan_of, prepare, rota_run, torchrun

NUM_PROCESSES = 4
ROLES = {"first": 0, "middle": 1, "last": 3}
_WARM_UP = 5  # steps, of which the first commits fetch their memory
PARTS = ("notice", "fork", "join", "restore", "step")


class Standstill(NamedTuple):
    """Milliseconds from a death to the end of the next new step, and its `PARTS`; none where several deaths overlap."""

    phase: str
    process: int
    total_ms: float
    parts_ms: tuple[float, ...]


class Told:
    """The lines of standard error that report a restart, with the times when they came."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.at_s: list[float] = []
        self.text = ""
        self._process = process
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        for line in self._process.stderr or ():
            self.text += line.decode()
            if b": restart " in line:
                self.at_s.append(time.monotonic())

    def join(self) -> None:
        self._thread.join()


def standstills(
    deaths: list[tuple[int, int, str]],
    start: Callable[[Path], subprocess.Popen[bytes]],
    start_undisturbed: Callable[[Path], subprocess.Popen[bytes]],
    num_ranks: int = NUM_PROCESSES,
    *,
    is_loaded: bool = False,
    **options: object,
) -> tuple[list[Standstill], int, str]:
    """One training with all the deaths: how long each took, how many steps were done again, and what commits cost.

    `is_loaded`: its processes read samples and the first weights of their stages from a folder, instead of drawing all.
    """
    with tempfile.TemporaryDirectory(prefix="rota-reliability-") as name:
        folder, quiet = Path(name, "disturbed"), Path(name, "undisturbed")
        if is_loaded:
            options = {**options, "inputs": str(written_inputs(Path(name), options))}
        last = max(step for step, *_ in deaths) + 4
        options = {**options, "num_steps": last + 1}
        prepare(folder, plan_of(num_ranks), deaths, **options)
        with start(folder) as process:
            told = Told(process)
            if process.wait():
                raise SystemExit(f"ended with {process.returncode}: {told.text[-3000:]}")
            told.join()
        found = done_in(folder)
        prepare(quiet, plan_of(num_ranks), **options)
        with start_undisturbed(quiet) as process:
            await_done(quiet, lambda done: bool(done) and done[-1].step >= last, process)
        num_again = compare(found, done_in(quiet))
        if left := leftovers(folder):
            raise SystemExit(f"left behind: {', '.join(left)}")
        return _measured(folder, deaths, found, told.at_s), num_again, cost_of_commits(quiet)


def written_inputs(folder: Path, options: dict[str, object]) -> Path:
    """The first weights of the training with these options, as a pretrained folder, and beside them its samples."""
    inputs, of_training = folder / "inputs", Options()._replace(**options)  # type: ignore[arg-type]
    inputs.mkdir()
    save_file(model_of(of_training).state_dict(), inputs / "model.safetensors")
    samples_of(of_training).numpy().tofile(inputs / "samples")
    return inputs


def cost_of_commits(folder: Path) -> str:
    """What part of a step commits take, in a training that was not disturbed."""
    step_s = statistics.median(b.at_s - a.at_s for a, b in pairwise(done_in(folder)))
    commits_s = [row.took_s for file in folder.glob("commits-*") for row in _commits_in(file) if row.is_committed]
    commit_s = statistics.median(commits_s)
    return (
        f"without faults: a step takes {1e3 * step_s:.3g} ms, a commit {1e3 * commit_s:.3g} ms, "
        f"{commit_s / step_s:.1%}; medians of {len(commits_s)} commits"
    )


class _Commit(NamedTuple):
    """A step's commit, or the place of one that was left out; `agreed_s` is when the step's optimizer began."""

    is_committed: bool
    agreed_s: float
    took_s: float


def _commits_in(file: Path) -> list[_Commit]:
    rows = [line.split() for line in file.read_text().splitlines()]
    return [_Commit(committed == "1", float(agreed), float(took)) for committed, agreed, took in rows]


def compare_commits(num_steps: int, is_loaded: bool, **options: object) -> str:
    """What commits cost all processes together: one training that commits about half of its steps, drawn at random.

    Where processes share cores and memory, a commit also slows the others, so it costs more than it takes. A step
    counts from one agreement of all processes to the next.
    """
    with tempfile.TemporaryDirectory(prefix="rota-reliability-") as name:
        folder = Path(name, "drawn")
        if is_loaded:
            options = {**options, "inputs": str(written_inputs(Path(name), options))}
        options = {**options, "save_every": None, "num_steps": num_steps, "commits": 0.5}
        prepare(folder, plan_of(NUM_PROCESSES), **options)
        with rota_run(folder) as process:
            if process.wait():
                raise SystemExit(f"ended with {process.returncode}: {(folder / 'stderr').read_text()[-3000:]}")
        rows = _commits_in(folder / "commits-0")[_WARM_UP:]
    told = []
    for is_committed, what in ((True, "with"), (False, "without")):
        steps_ms = [1e3 * (b.agreed_s - a.agreed_s) for a, b in pairwise(rows) if a.is_committed == is_committed]
        low, middle, high = statistics.quantiles(steps_ms, n=4)
        told.append(
            f"{what} commit: {len(steps_ms)} steps, median {middle:.4g} ms, quartiles {low:.4g} and {high:.4g} ms, "
            f"mean {statistics.mean(steps_ms):.4g} ms"
        )
    return "\n".join(told)


def _measured(
    folder: Path, deaths: list[tuple[int, int, str]], found: list[Done], told_s: list[float]
) -> list[Standstill]:
    died_s = [float((folder / f"dead-{number}").read_text()) for number in range(len(deaths))]
    starts = [[float(word) for word in line.split()] for line in (folder / "starts").read_text().splitlines()]
    overlap = {n for a, b in pairwise(range(len(deaths))) if deaths[b][2] in RECOVERY for n in (a, b)}
    rows = []
    for number, (_, process, phase) in enumerate(deaths):
        if phase in RECOVERY:
            continue
        dead_s = died_s[number]
        start = next(start for start in starts if start[2] > dead_s)
        before = max((done.step for done in found if done.at_s < start[2]), default=-1)
        next_s = next(done.at_s for done in found if done.step > before)
        parts: list[float] = []
        if number not in overlap and told_s:
            notice_s = next(at for at in told_s if at > dead_s)
            parts = [b - a for a, b in pairwise([dead_s, notice_s, *start, next_s])]
        shown = f"{phase}, then {deaths[number + 1][2]}" if number in overlap else phase
        rows.append(Standstill(shown, process, 1e3 * (next_s - dead_s), tuple(1e3 * part for part in parts)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=32, help="4096: some 200 MB of weights and AdamW's state per rank")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--few", action="store_true", help="one role per phase, no saves, no deaths that overlap")
    parser.add_argument("--phases", nargs="+", choices=PHASES, help="with --few: only these")
    parser.add_argument("--loaded", action="store_true", help="samples and first weights from files, instead of drawn")
    parser.add_argument("--on-meta", action="store_true", help="the model is made in rota.meta_init")
    parser.add_argument("--torchrun-kills", type=int, default=3)
    parser.add_argument("--commits", type=int, metavar="STEPS", help="only compare steps with and without a commit")
    options = parser.parse_args()
    of_all = {"width": options.width, "rows": options.rows, "is_loaded": options.loaded}
    of_all |= {"save_every": None if options.few else EVERY, "is_on_meta": options.on_meta}
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, {NUM_PROCESSES} processes")

    if options.commits:
        print(compare_commits(options.commits, **of_all))
        return
    phases = [phase for phase in PHASES if phase != "reduce"]
    if options.few:
        phases.remove("save")
        phases = options.phases or phases
        deaths = spread([(process, phase) for phase, process in zip(phases, [0, 1, 3] * 4, strict=False)])
    else:
        deaths = spread([(process, phase) for phase in phases for process in ROLES.values()] + [*AT_ONCE])
    of_all["evaluate_every"] = EVERY if "evaluate" in phases else None
    rows, num_again, cost = standstills(deaths, _piped, rota_run, **of_all)
    if not options.few:
        reduces = spread([(process, "reduce") for process in (0, 3)])
        two, again_of_two, _ = standstills(reduces, _piped_replicas, _replicas, 2, dp=2, **of_all)
        rows, num_again = rows + two, num_again + again_of_two
    _print(rows, num_again)
    print(cost)
    if options.torchrun_kills:
        deaths = spread([(process, "forward") for process in (0, 1, 3, 2)[: options.torchrun_kills]])
        theirs, num_again, _ = standstills(deaths, _piped_torchrun, rota_run, **of_all)
        total = [row.total_ms for row in theirs]
        print(f"torchrun, forward: {_of(total)}; {num_again} steps were done again")


def _piped(folder: Path) -> subprocess.Popen[bytes]:
    return rota_run(folder, stderr=subprocess.PIPE)


def _piped_replicas(folder: Path) -> subprocess.Popen[bytes]:
    return rota_run(folder, dp=2, stderr=subprocess.PIPE)


def _replicas(folder: Path) -> subprocess.Popen[bytes]:
    return rota_run(folder, dp=2)


def _piped_torchrun(folder: Path) -> subprocess.Popen[bytes]:
    return torchrun(folder, NUM_PROCESSES)


def _of(total_ms: list[float]) -> str:
    return f"median {statistics.median(total_ms) / 1e3:.2f} s, worst {max(total_ms) / 1e3:.2f} s of {len(total_ms)}"


def _print(rows: list[Standstill], num_again: int) -> None:
    """The table of phases, then the parts."""
    print("| killed in | by process: seconds to the next new step |\n|---|---|")
    for phase in dict.fromkeys(row.phase for row in rows):
        each = [f"{row.process}: {row.total_ms / 1e3:.2f}" for row in rows if row.phase == phase]
        print(f"| {phase} | {', '.join(each)} |")
    single = [row for row in rows if row.parts_ms]
    print(f"\nrota run: {_of([row.total_ms for row in rows])}; {num_again} steps were done again")
    parts = [statistics.median(row.parts_ms[part] for row in single) for part in range(len(PARTS))]
    print("median of each part: " + ", ".join(f"{name} {ms:.0f} ms" for name, ms in zip(PARTS, parts, strict=True)))


if __name__ == "__main__":
    main()
