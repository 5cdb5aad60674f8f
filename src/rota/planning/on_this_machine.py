"""`rota autoplan` within its time limit: measure on this machine, search, and run steps of the best plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rota.core.errors import PipelineError
from rota.core.layers import Profile
from rota.planning.answer import Answer
from rota.planning.autoplanning import autoplan
from rota.planning.deadline import Deadline
from rota.planning.machine import Machine
from rota.planning.request import MEASURED_HERE, Choices, Measuring, refuse_cuts_in_blocks

if TYPE_CHECKING:
    from rota.planning.model_file import ModelFile  # with torch, which a profile alone can be planned without

_ROWS = (1, 2, 4, 8)  # of a micro-batch, by default
_PER_RANK = 2  # micro-batches of a step, without which a pipeline's ranks wait too much
_PROFILE = 0.4  # of the time limit, for measuring the layers at all numbers of rows that fit
_LINKS = 0.5  # of the time that is left then, for links that were never measured here; then for all-reduces
_SEARCH = 0.45  # of the time that is left after measuring: the rest is for steps of the best plans
_LEAST_SEARCH_S = 3.0  # even if measuring took all of the time: without a plan the measurements would be lost
_LEAST_S = 0.2

Report = Callable[[object], None]


@dataclass(frozen=True, slots=True)
class Job:
    """What `rota autoplan` is asked for.

    Attributes:
        machine: The processes, their memory, speed and links.
        batch_rows: Rows of a step, over all replicas.
        choices: What may be chosen.
        model_file: The model; None: a profile is all there is.
        profile: The layers' costs; None: they are measured, or estimated.
        rows: Numbers of rows per micro-batch to measure; none: the usual ones that divide the batch.
        measuring: How layers are measured.
        wants_links: Whether the links of the machine are those between processes here, to be measured.
        elsewhere: Why no steps are run on this machine; "" if they are.
        predicted_because: Why nothing but the layers is measured; "" if more is.
    """

    machine: Machine
    batch_rows: int
    choices: Choices
    model_file: ModelFile | None = None
    profile: Profile | None = None
    rows: Sequence[int] = ()
    measuring: Measuring = MEASURED_HERE
    wants_links: bool = False
    elsewhere: str = ""
    predicted_because: str = ""


def plan_here(job: Job, deadline: Deadline, report: Report) -> Answer:
    """Measure what the job does not give, search, and try the best plans, in the time that is left."""
    model_file = None if job.predicted_because else job.model_file  # to be tried
    profile, machine, links_because, least_s = job.profile, job.machine, "", _LEAST_S
    remarks: list[str] = []
    if profile is None:
        assert job.model_file is not None
        profile, remarks = profile_in_time(job, job.model_file, deadline, report)
        least_s = _LEAST_SEARCH_S
    if not (job.choices.recompute or job.choices.copies):
        refuse_cuts_in_blocks(profile)
    if model_file is not None and job.wants_links:
        machine, links_because, doubts = with_links(machine, job.measuring, deadline, report)
        remarks += doubts
    time_limit_s = max(deadline.left_s * (1 if model_file is None else _SEARCH), least_s)
    answer = autoplan(profile, machine, job.batch_rows, job.choices, time_limit_s=time_limit_s, progress=report)
    answer = replace(answer, remarks=(*remarks, *answer.remarks), links_because=links_because)
    if model_file is None:
        return replace(answer, predicted_because=job.predicted_because or answer.predicted_because)
    from rota.planning.confirmation import Training, confirm

    report("making the model")
    model = model_file.make_model()  # which may take long
    training = Training(model, model_file.make_batch, model_file.loss_fn, model_file.make_optimizer)
    return confirm(answer, training, report, time_limit_s=max(deadline.left_s, _LEAST_S), elsewhere=job.elsewhere)


def profile_in_time(job: Job, model_file: ModelFile, deadline: Deadline, report: Report) -> tuple[Profile, list[str]]:
    """The layers' costs, measured or estimated, and a remark on the numbers of rows for which there was no time."""
    from rota.planning.model_file import profile_file

    rows = job.rows or [size for size in _ROWS if job.batch_rows % size == 0]
    sizes = by_importance(rows, job.batch_rows, job.choices.pipeline_ranks or job.machine.num_ranks)
    left_s = max(_PROFILE * deadline.seconds - deadline.elapsed_s, 0.0)
    profile = profile_file(model_file, sizes, job.measuring, report, left_s)
    missing = ", ".join(map(str, sorted({*sizes} - {*profile})))
    remark = f"left out for lack of time: micro-batches of {missing} rows; give a longer --time-limit"
    return profile, [remark] if missing else []


def by_importance(sizes: Sequence[int], batch_rows: int, num_ranks: int) -> list[int]:
    """The largest size of which each rank of a pipeline gets two or more, the smallest, then the others, largest first.

    Large micro-batches make ops efficient, and the first of them is measured even if no time is left for others.
    """
    ascending = sorted({*sizes})
    largest = max((rows for rows in ascending if batch_rows >= _PER_RANK * num_ranks * rows), default=ascending[0])
    return list(dict.fromkeys([largest, ascending[0], *reversed(ascending)]))


def with_links(
    machine: Machine, measuring: Measuring, deadline: Deadline, report: Report
) -> tuple[Machine, str, list[str]]:
    """The machine with links between CPUs of this one, on which plans are tried; why they were not measured; remarks.

    Links are kept in a cache that is a folder, not in a file, which is for layers alone.
    """
    from rota.profiling.devices import why_not_here
    from rota.profiling.machine_links import links_of_this_machine

    if why_not_here(machine.num_ranks):
        return machine, "this takes a core per rank", []
    report("measuring the links between processes")
    cache = None if measuring.cache is None or str(measuring.cache).endswith(".json") else str(measuring.cache)
    how: dict[str, Any] = {"cache": cache, "refresh": measuring.refresh, "within_s": _LINKS * deadline.left_s}
    try:
        links = links_of_this_machine(machine.num_ranks, device="cpu", report=report, **how)
    except PipelineError as error:
        return machine, str(error), []
    doubts = [f"links were measured on a busy machine: {links.doubt}"] if links.doubt else []
    return replace(machine, link=links.cluster), "", doubts
