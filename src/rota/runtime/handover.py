"""What `rota run` and its ranks hand to each other, through a folder: the plan, requests to end, records of steps."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

from rota import reading
from rota.errors import PipelineError
from rota.plan import Plan
from rota.replanning import replan
from rota.runtime.recorder import Record
from rota.simulation import simulate
from rota.units import count_text, time_text

# Environment variables, set by the launcher.
_FOLDER, _RESTART = "ROTA_FOLDER", "ROTA_RESTART"
_STOPS, _STOP = "stops", "stop"  # files: the script looks at `should_stop`; it shall


def digest(plan: Plan) -> str:
    """Tells plans apart."""
    return hashlib.sha256(plan.to_json().encode()).hexdigest()


def leave_plan(plan: Plan, folder: str) -> dict[str, str]:
    """Leave the plan for the ranks; returns the environment by which they find it."""
    Path(folder, "plan.json").write_text(plan.to_json())
    return {_FOLDER: folder}


def is_launched() -> bool:
    """Whether `rota run` started this process, and shows what all ranks of this machine write."""
    return _FOLDER in os.environ


def given_plan(path: str | Path | None = None, *, dp: int = 1, tp: int = 1) -> Plan:
    """The plan that `rota run` was given; without `rota run`, such as under torchrun, the one in the file `path`.

    That one is planned anew where the processes that were started, in `dp` replicas of `tp` parts each, are not as many
    as its ranks: the same stages on as many ranks as there are, the same plan on each, which the first process tells.
    Raises PipelineError where there is no plan, PlacementError or PlanError where it cannot be had on as many ranks.
    """
    folder = os.environ.get(_FOLDER)
    if folder is not None:
        return Plan.from_json(Path(folder, "plan.json").read_text())
    if path is None:
        raise PipelineError(
            "no plan was handed over; start the script by `rota run plan.json script.py`, or name the plan's file for "
            "torchrun: rota.given_plan('plan.json')"
        )
    plan = Plan.from_json(reading.read_text(str(path)))
    size = int(os.environ.get("WORLD_SIZE", plan.num_ranks * dp * tp))
    if size % (dp * tp):
        raise PipelineError(
            f"{size} processes cannot be shared out to dp={dp} replicas of tp={tp} parts each; start a multiple of "
            f"{dp * tp}"
        )
    moved = replan(plan, size // (dp * tp))
    if moved is not plan and os.environ.get("RANK") == "0":
        before, after = (time_text(simulate(one).makespan_us) for one in (plan, moved))
        print(
            f"rota: {path} is for {count_text(plan.num_ranks, 'rank')}, and was planned anew for {moved.num_ranks}: "
            f"makespan {after}, was {before}",
            file=sys.stderr,
            flush=True,
        )
    return moved


# --- restarts and requests to end -------------------------------------------------------------------------------------


def leave_restart(number: int) -> dict[str, str]:
    """The environment by which ranks know that they are started once more."""
    return {_RESTART: str(number)}


def is_restart() -> bool:
    """Whether `rota run` or torchrun has started this process in the place of one that failed."""
    return any(os.environ.get(name, "0") != "0" for name in (_RESTART, "TORCHELASTIC_RESTART_COUNT"))


def leave_stops() -> None:
    """Tell the launcher, if there is one, that the script ends by itself when asked to."""
    if _FOLDER in os.environ:
        Path(os.environ[_FOLDER], _STOPS).touch()


def ask_to_stop(folder: str) -> bool:
    """Ask the ranks to end after the step that is running; whether the script looks at it."""
    if not Path(folder, _STOPS).exists():
        return False
    Path(folder, _STOP).touch()
    return True


def stop_is_asked() -> bool:
    """Whether the launcher has asked."""
    return _FOLDER in os.environ and os.path.exists(os.path.join(os.environ[_FOLDER], _STOP))


# --- records ----------------------------------------------------------------------------------------------------------


def leave_record(plan: Plan, record: Record) -> None:
    """Leave a rank's record for the launcher, if there is one."""
    if _FOLDER in os.environ:
        _path(os.environ[_FOLDER], plan, record.rank).write_text(json.dumps(record.to_fields()))


def collect(plan: Plan, folder: str) -> list[Record]:
    """The ranks' records of the last steps; none if not every rank has left its own."""
    files = [_path(folder, plan, rank) for rank in range(plan.num_ranks)]
    if not all(file.exists() for file in files):
        return []
    return [Record.from_fields(json.loads(file.read_text())) for file in files]


def _path(folder: str, plan: Plan, rank: int) -> Path:
    # By plan, since a script may run pipelines of several.
    return Path(folder, f"{digest(plan)[:16]}.rank{rank}.json")
