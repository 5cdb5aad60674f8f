"""What `rota run` and its ranks exchange: files in a folder, and environment variables."""

from __future__ import annotations

import hashlib
import json
import multiprocessing.util
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rota.core import reading
from rota.core.errors import FormatError, PipelineError
from rota.core.plan import Plan
from rota.core.text import count_text
from rota.runtime.environment import FOLDER, KEPT_MEMORY, RESTART
from rota.runtime.recorder import Record

_SCRIPT = "script.py"
_SNAPSHOT = re.compile(r"([0-9a-f]{16})-([0-9]{1,18})\.safetensors")


def digest(plan: Plan) -> str:
    """The SHA-256 of a plan, which identifies it."""
    return hashlib.sha256(reading.dump("plan", plan.to_fields()).encode()).hexdigest()


def write_plan(plan: Plan, folder: str) -> dict[str, str]:
    """Write the plan for the ranks; returns the environment through which they find it."""
    Path(folder, "plan.json").write_text(plan.to_json())
    return {FOLDER: folder}


def given_plan(path: str | Path | None = None) -> Plan:
    """The plan that `rota run` was given; without `rota run`, such as under torchrun, the one in the file `path`.

    Args:
        path: the file of a plan, for scripts that `rota run` did not start.

    Raises:
        PipelineError: no plan was given, or the processes are not a multiple of the plan's ranks.
    """
    folder = os.environ.get(FOLDER)
    if folder is not None:
        return Plan.from_json(Path(folder, "plan.json").read_text())
    if path is None:
        raise PipelineError(
            "no plan was given; start the script with `rota run plan.json script.py`, or name the plan's file for "
            "torchrun: rota.given_plan('plan.json')"
        )
    plan = Plan.from_json(reading.read_text(str(path)))
    num_processes = int(os.environ.get("WORLD_SIZE", plan.num_ranks))
    if num_processes % plan.num_ranks:
        raise PipelineError(
            f"{path} is for {count_text(plan.num_ranks, 'rank')}, but {num_processes} processes were "
            f"started; start {plan.num_ranks}, or a multiple for replicas, or plan again for {num_processes}"
        )
    return plan


def keep_sockets_in_run_folder() -> None:
    """Let `multiprocessing` make its sockets, such as those of a DataLoader's workers, in the run's folder.

    It removes them when a process ends, but not of one that is killed; the run's folder is removed in any case.
    """
    if (folder := os.environ.get(FOLDER)) is not None:
        before, tempfile.tempdir = tempfile.tempdir, folder
        try:
            multiprocessing.util.get_temp_dir()  # which this process and its children use from now on
        finally:
            tempfile.tempdir = before


def keep_script(script: str, folder: str) -> None:
    """Read the script, once for all starts of the ranks, and keep it in the folder of the run."""
    Path(folder, _SCRIPT).write_bytes(Path(script).read_bytes())


def kept_script() -> bytes:
    """The script as it was when the run began."""
    return Path(os.environ[FOLDER], _SCRIPT).read_bytes()


def report_changed_script(script: str, folder: str, report: Callable[[str], None]) -> None:
    """Say so if the file of the script is not what it was when the run began: the ranks will run what it was."""
    try:
        is_same = Path(script).read_bytes() == Path(folder, _SCRIPT).read_bytes()
    except OSError:
        is_same = False
    if not is_same:
        report(
            f"{script} has changed since the run began: the ranks run it as it was then, but the modules that it "
            f"imports are read again"
        )


def is_first_to_say(text: str) -> bool:
    """Whether no other rank of this start has asked this with the same text before."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return True
    name = f"said-{os.environ.get(RESTART, '0')}-{hashlib.sha256(text.encode(errors='replace')).hexdigest()}"
    try:
        Path(folder, name).touch(exist_ok=False)
    except OSError as error:  # a full disk must not hide an error
        return not isinstance(error, FileExistsError)
    return True


def is_restart() -> bool:
    """Whether `rota run` or torchrun started this process to replace one that failed."""
    return any(os.environ.get(name, "0") != "0" for name in (RESTART, "TORCHELASTIC_RESTART_COUNT"))


# --- records ----------------------------------------------------------------------------------------------------------


def leave_record(plan: Plan, record: Record) -> None:
    """Write a rank's record for the launcher, if there is one."""
    if FOLDER in os.environ:
        folder, restart = os.environ[FOLDER], int(os.environ.get(RESTART, "0"))
        _path(folder, plan, record.rank, restart).write_text(json.dumps(record.to_fields()))


def collect(plan: Plan, folder: str, restart: int = 0) -> list[Record]:
    """The ranks' records of the last steps since that restart; an empty list unless every rank has written one.

    Raises FormatError if one is not a valid record.
    """
    files = [_path(folder, plan, rank, restart) for rank in range(plan.num_ranks)]
    if not all(file.exists() for file in files):
        return []
    records = [Record.from_fields(reading.load(file.read_text()), file.name) for file in files]
    for rank, (file, record) in enumerate(zip(files, records, strict=True)):
        if record.rank != rank:
            raise FormatError(f"{file.name}.rank is {record.rank}; expected {rank}")
    return records


def _path(folder: str, plan: Plan, rank: int, restart: int) -> Path:
    # Named by plan, as a script may run pipelines of several plans, and by restart, so that old records are not read.
    return Path(folder, f"{digest(plan)[:16]}.restart{restart}.rank{rank}.json")


# --- snapshots --------------------------------------------------------------------------------------------------------


class State(NamedTuple):
    """A state that is kept or saved: of which training of the script, and after how many steps."""

    training: str
    step: int

    @property
    def file(self) -> str:
        """The name of its snapshot."""
        return f"{self.training}-{self.step}.safetensors"


def snapshot_folder() -> Path | None:
    """The folder of this rank's snapshots, in memory, which outlives the rank.

    None if the launcher keeps none, and would not start this rank again.
    """
    return Path(os.environ[KEPT_MEMORY]) if KEPT_MEMORY in os.environ else None


def states_in(folder: Path) -> set[State]:
    """The states that are whole in a rank's folder."""
    names = map(_SNAPSHOT.fullmatch, os.listdir(folder))
    return {State(match[1], int(match[2])) for match in names if match}
