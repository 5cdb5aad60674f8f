"""What `rota run` and its ranks hand to each other, through a folder: the plan, and the records of the last step."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from rota.errors import PipelineError
from rota.plan import Plan
from rota.runtime.recorder import Record, merge
from rota.timeline import Timeline

_FOLDER = "ROTA_FOLDER"  # an environment variable, set by the launcher


def digest(plan: Plan) -> str:
    """Tells plans apart."""
    return hashlib.sha256(plan.to_json().encode()).hexdigest()


def leave_plan(plan: Plan, folder: str) -> dict[str, str]:
    """Leave the plan for the ranks; returns the environment by which they find it."""
    Path(folder, "plan.json").write_text(plan.to_json())
    return {_FOLDER: folder}


def given_plan() -> Plan:
    """The plan that `rota run` was given; raises PipelineError in a script that was started otherwise."""
    folder = os.environ.get(_FOLDER)
    if folder is None:
        raise PipelineError("no plan was handed over; start the script by `rota run plan.json script.py`")
    return Plan.from_json(Path(folder, "plan.json").read_text())


def leave_record(plan: Plan, record: Record) -> None:
    """Leave a rank's record for the launcher, if there is one."""
    if _FOLDER in os.environ:
        _path(os.environ[_FOLDER], plan, record.rank).write_text(json.dumps(record.to_fields()))


def collect(plan: Plan, folder: str) -> Timeline | None:
    """The timeline of the last step; None if not every rank has left its record."""
    files = [_path(folder, plan, rank) for rank in range(plan.num_ranks)]
    if not all(file.exists() for file in files):
        return None
    return merge(plan, [Record.from_fields(json.loads(file.read_text())) for file in files])


def _path(folder: str, plan: Plan, rank: int) -> Path:
    # By plan, since a script may run pipelines of several.
    return Path(folder, f"{digest(plan)[:16]}.rank{rank}.json")
