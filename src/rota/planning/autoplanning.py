"""`autoplan`: cuts, placements, micro-batch sizes, recomputation, replicas and schedules, chosen together.

`plan_here` is `rota autoplan`: within its time limit, it measures on this machine, and runs steps of the best plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rota.core.errors import NothingFitsError, PipelineError, SearchError
from rota.core.layers import LayerCosts, Profile
from rota.core.simulation import check
from rota.core.stopping import Stopped, ended_by_ctrl_c, watched
from rota.core.text import count_text, size_text
from rota.planning.answer import Answer, Counts
from rota.planning.choosing import Contender, recommended
from rota.planning.evaluation import Misfit, evaluate
from rota.planning.layouts import Candidate, Layout, cuts
from rota.planning.machine import Machine
from rota.planning.request import (
    ANYTHING,
    MEASURED_HERE,
    Choices,
    Deadline,
    Measuring,
    Progress,
    Request,
    refuse_cuts_in_blocks,
)
from rota.planning.sweep import Kind, Sweep, kind_of, search_finalists
from rota.schedules import NAMED

if TYPE_CHECKING:
    from rota.planning.model_file import ModelFile  # with torch, which a profile alone can be planned without

_ONE_F_ONE_B = NAMED["1f1b"]
_ROWS = (1, 2, 4, 8)  # of a micro-batch, by default
_PER_RANK = 2  # micro-batches of a step, without which a pipeline's ranks wait too much
_PROFILE = 0.4  # of the time limit, for measuring the layers at all numbers of rows that fit
_LINKS = 0.5  # of the time that is left then, for links that were never measured here; then for all-reduces
_SEARCH = 0.45  # of the time that is left after measuring: the rest is for steps of the best plans
_LEAST_SEARCH_S = 3.0  # even if measuring took all of the time: without a plan the measurements would be lost
_LEAST_S = 0.2

Report = Callable[[object], None]


def autoplan(
    profiles: Mapping[int, LayerCosts],
    machine: Machine,
    batch_rows: int,
    choices: Choices = ANYTHING,
    *,
    time_limit_s: float = 60.0,
    progress: Callable[[Progress], None] | None = None,
) -> Answer:
    """Find the fastest way to do training steps of a model on a machine.

    It chooses together: ranks per pipeline and replicas, cuts, stages per rank and their shape, rows per micro-batch,
    recomputation, and the schedule. As simulated, the plan is never slower than any named schedule with the same number
    of layers in each stage and nothing or everything recomputed, unless time runs out: then the answer says so. With
    the search extra it also searches the orders of the best candidates. Among plans that are equally fast within the
    profile's spread, it takes the simplest. It uses replicas only if the cost of their all-reduces is known, and
    recomputes stages only if memory is limited.

    Ctrl-C ends the search with the best plan so far. An error that `progress` raises does the same: it is a warning and
    the answer's `stopped_by`, or is raised if there is no plan yet. A search that ends by itself gives the same answer
    every time.

    Args:
        profiles: The model's layers by rows per micro-batch, such as a `rota.core.layers.Profile`.
        machine: The processes, their memory, speed and links.
        batch_rows: Rows of a step, over all replicas.
        choices: What may be chosen.
        time_limit_s: Seconds to search for.
        progress: Called several times per second.

    Returns:
        The best plan, others of different kinds, and why each of them is slower.

    Raises:
        PlacementError: Arguments contradict each other.
        NothingFitsError: No plan fits; the message says what would fit.
    """
    if not 0 < time_limit_s < math.inf:
        raise SearchError(f"time_limit_s is {time_limit_s!r}; give a number of seconds above 0")
    request, deadline = Request(profiles, machine, batch_rows, choices), Deadline(time_limit_s, progress)
    sweep = Sweep(request, deadline)
    with ended_by_ctrl_c(deadline):
        # A search of orders that finds nothing in time may still look at the clock while it says why.
        with watched(lambda: deadline.left_s <= 0), suppress(Stopped):
            sweep.run()
            search_finalists(sweep)
        if not sweep.plans:
            raise deadline.progress_error or _nothing_fits(sweep)
        best = recommended(sweep.plans, request.tolerance)
        usual = usual_plan(best)
    check(best.plan)
    return Answer(
        request,
        _ordered(best, sweep.plans, request.tolerance),
        usual,
        Counts(sweep.num_layouts, sweep.num_pruned, sweep.num_misfits, sweep.num_left, sweep.num_plans),
        sweep.bound_us,
        deadline.elapsed_s,
        deadline.stopped_by,
        deadline.ran_out,
        tolerance=request.tolerance,
        one_process=one_process(request),
        remarks=(*request.doubts, *sweep.remarks),
    )


def _ordered(best: Contender, plans: Collection[Contender], tolerance: float) -> tuple[Contender, ...]:
    """The best plan, the fastest if that is another one, and of each other kind the simplest of the fastest."""
    fastest = min(plans, key=lambda plan: plan.key)
    first = [best, fastest] if fastest.step_us < best.step_us else [best]
    kinds: dict[Kind, list[Contender]] = {}
    for plan in plans:
        kinds.setdefault(kind_of(plan), []).append(plan)
    others = [recommended(alike, tolerance) for kind, alike in kinds.items() if kind not in map(kind_of, first)]
    return *first, *sorted(others, key=lambda plan: plan.key)


def one_process(request: Request) -> Contender | None:
    """The model as it is, on one process, with as much memory as it takes, at the best number of rows.

    The process is as fast as the fastest one. None for inference.
    """
    if request.choices.inference:
        return None
    choices = replace(request.choices, pipeline_ranks=None)
    alone = replace(request, machine=Machine(1, slowdowns=(min(request.machine.slowdowns),)), choices=choices)
    plans = []
    for rows, layers in request.profiles.items():
        if request.batch_rows % rows == 0:
            layout = Layout(1, 1, rows, request.batch_rows // rows)
            plan = evaluate(Candidate(alone, layout, (0, layers.num_layers)), _ONE_F_ONE_B, math.inf)
            plans += [plan] if isinstance(plan, Contender) else []
    return min(plans, key=lambda plan: plan.key, default=None)


def usual_plan(best: Contender) -> Contender | Misfit | None:
    """1F1B on equal layers, one stage per rank, with the ranks, replicas and micro-batches of the best plan."""
    request = best.candidate.request
    if request.choices.inference:
        return None
    layout = replace(best.candidate.layout, shape="chain", stages_per_rank=1, recompute="none")
    boundaries = cuts(best.candidate.layers, layout, request.machine)[0]
    return evaluate(Candidate(request, layout, boundaries), _ONE_F_ONE_B, math.inf)


def _nothing_fits(sweep: Sweep) -> NothingFitsError:
    """The error that names the smallest memory that would be enough, of all that was tried, and on which rank."""
    elapsed_s = sweep.deadline.elapsed_s
    closest = sweep.closest()
    if closest is None:
        return NothingFitsError(
            f"found no plan in {elapsed_s:.0f} s; give more time, or fewer numbers of rows to choose from"
        )
    candidate, layout = closest.candidate, closest.candidate.layout
    num_recomputed = len(candidate.recomputed)
    recomputing = "full recomputation" if num_recomputed == layout.num_stages else f"{num_recomputed} recomputed stages"
    rows = f"micro-batches of {layout.rows} row{'s' if layout.rows > 1 else ''}"
    smaller = "smaller micro-batches (--rows), " if min(sweep.request.profiles) > 1 else ""
    # What was not tried may need less.
    nothing = (
        f"found nothing that fits in {elapsed_s:.0f} s, with {sweep.num_left:,} of {sweep.num_layouts:,} "
        f"layouts not examined: give a longer --time-limit. So far, the plan that needs the least memory"
        if sweep.deadline.ran_out or sweep.num_left > 0
        else "found nothing that fits: the plan that needs the least memory"
    )
    return NothingFitsError(
        f"{nothing} is {closest.schedule} on {count_text(layout.num_ranks, 'rank')} x {layout.num_replicas}, "
        f"{rows}, with {recomputing if num_recomputed else 'nothing recomputed'}, where rank {closest.rank} needs "
        f"{size_text(closest.num_bytes)}, {size_text(closest.over_bytes)} over its limit; give "
        f"--memory {_at_least(closest.num_bytes)}, {smaller}or more ranks"
    )


def _at_least(num_bytes: int) -> str:
    """43098000000 -> "43.1GB": rounded up, as the command line takes it."""
    step = 10 ** max(len(str(num_bytes)) - 3, 0)
    return size_text(-(-num_bytes // step) * step).replace(" ", "")


# --- on this machine --------------------------------------------------------------------------------------------------


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
        profile, remarks = _profile_in_time(job, job.model_file, deadline, report)
        least_s = _LEAST_SEARCH_S
    if not (job.choices.recompute or job.choices.copies):
        refuse_cuts_in_blocks(profile)
    if model_file is not None and job.wants_links:
        machine, links_because, doubts = _with_links(machine, job.measuring, deadline, report)
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


def _profile_in_time(job: Job, model_file: ModelFile, deadline: Deadline, report: Report) -> tuple[Profile, list[str]]:
    """The layers' costs, measured or estimated, and a remark on the numbers of rows for which there was no time."""
    from rota.planning.model_file import profile_file

    rows = job.rows or [size for size in _ROWS if job.batch_rows % size == 0]
    sizes = _by_importance(rows, job.batch_rows, job.choices.pipeline_ranks or job.machine.num_ranks)
    left_s = max(_PROFILE * deadline.seconds - deadline.elapsed_s, 0.0)
    profile = profile_file(model_file, sizes, job.measuring, report, left_s)
    missing = ", ".join(map(str, sorted({*sizes} - {*profile})))
    remark = f"left out for lack of time: micro-batches of {missing} rows; give a longer --time-limit"
    return profile, [remark] if missing else []


def _by_importance(sizes: Sequence[int], batch_rows: int, num_ranks: int) -> list[int]:
    """The largest size of which each rank of a pipeline gets two or more, the smallest, then the others, largest first.

    Large micro-batches make ops efficient, and the first of them is measured even if no time is left for others.
    """
    ascending = sorted({*sizes})
    largest = max((rows for rows in ascending if batch_rows >= _PER_RANK * num_ranks * rows), default=ascending[0])
    return list(dict.fromkeys([largest, ascending[0], *reversed(ascending)]))


def _with_links(
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
