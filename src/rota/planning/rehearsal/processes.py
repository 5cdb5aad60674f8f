"""Starts a rehearsal's processes on this machine and returns their reports; leaves no process behind.

rehearse ──▶ server ──▶ rank 0, rank 1, …       the server loads torch once, and the ranks are forked from it
    stdin: its end means that the caller is gone; the server then ends all ranks
    stdout: lines of progress, and the result at the end
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rota.errors import PipelineError
from rota.plan import Plan
from rota.planning.rehearsal.rank_step import RankReport

_PATIENCE_S = 10  # for the server to end its ranks
# For glibc's malloc: larger buffers get pages of their own, which go back to the system when they are freed. By default
# it keeps many of them, and a process would grow by more than its buffers.
_OWN_PAGES = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def run_ranks(
    plans: Sequence[Plan],
    num_steps: int,
    allocate: bool,
    timeout_s: float,
    step_ended: Callable[[int], None],
    device: str,
) -> list[RankReport]:
    """Call `run_rank` in one new process per rank; returns their reports by rank. Raises PipelineError if one fails.

    `device`: the type of device that each rank has.
    """
    with tempfile.TemporaryDirectory(prefix="rota-rehearsal-") as folder:
        for i, plan in enumerate(plans):
            plan_file(folder, i).write_text(plan.to_json())
        options = {"num_steps": num_steps, "allocate": allocate, "timeout_s": timeout_s, "device": device}
        Path(folder, "options.json").write_text(json.dumps(options))
        with open(Path(folder, "stderr"), "w") as stderr:
            server = subprocess.Popen(
                [sys.executable, "-P", "-m", "rota.planning.rehearsal.server", folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(_OWN_PAGES if allocate else {})},
                start_new_session=True,  # Ctrl-C reaches the caller alone, which ends the server
            )
        try:
            _follow(server, folder, step_ended)
        finally:
            _end(server)
        return [RankReport.from_json(report_file(folder, rank).read_text()) for rank in range(plans[0].num_ranks)]


def _follow(server: subprocess.Popen[bytes], folder: str, step_ended: Callable[[int], None]) -> None:
    """Read the server's lines until it reports the result. Raises PipelineError for a failure."""
    assert server.stdout is not None
    for line in server.stdout:
        message: dict[str, Any] = json.loads(line)
        if "num_ended" in message:
            step_ended(message["num_ended"])
        elif message["rank"] is None:
            return
        else:
            raise PipelineError(_failure_text(message["rank"], message["code"], folder))
    last = _last_words(Path(folder, "stderr"))
    raise PipelineError(f"the process that starts the ranks ended early{last}")


def _end(server: subprocess.Popen[bytes]) -> None:
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.close()
    try:
        server.wait(_PATIENCE_S)
    except BaseException:
        server.kill()  # and its ranks with it
        server.wait()
        raise
    finally:
        server.stdout.close()


def _failure_text(rank: int, code: int, folder: str) -> str:
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"rank {rank} ended with {ended}, and the others were ended{_last_words(stderr_file(folder, rank))}"


def _last_words(file: Path) -> str:
    """The last error that Rota wrote to the file, which may have several lines, else its last line."""
    lines = file.read_text().strip().splitlines() if file.exists() else []
    ours = [i for i, line in enumerate(lines) if line.startswith("rota: ")]
    words = "\n".join(lines[ours[-1] if ours else -1 :])
    return f": {words.removeprefix('rota: ')}" if words else ""


def plan_file(folder: str, number: int) -> Path:
    """The file in `folder` that has the plan with this number, in the order in which they run."""
    return Path(folder, f"plan{number}.json")


def report_file(folder: str, rank: int) -> Path:
    """The file in `folder` to which a rank writes its report."""
    return Path(folder, f"rank{rank}.json")


def stderr_file(folder: str, rank: int) -> Path:
    """The file in `folder` that gets a rank's standard error."""
    return Path(folder, f"rank{rank}.stderr")
