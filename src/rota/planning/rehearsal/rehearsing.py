"""`rehearse`: runs a plan on this machine and turns the ranks' records into one timeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from rota.checking import check
from rota.cluster import Link
from rota.errors import UsageError
from rota.plan import Plan
from rota.planning.rehearsal.allocation import blocks_of, refuse_too_much
from rota.planning.rehearsal.outcome import BatchesRehearsal, LinkUse, MemoryUse, Overhead, Rehearsal
from rota.planning.rehearsal.processes import run_ranks
from rota.planning.rehearsal.rank_step import RankReport, num_warm_ups
from rota.runtime.device.local import AUTO, CPU, device_type
from rota.runtime.plan_fit import refuse_unsupported
from rota.runtime.recorder import Record, merge
from rota.simulation import simulate
from rota.timeline import Timeline
from rota.units import count_text, time_text

_MOST_RANKS = 256  # each has two connections to every other: more ranks exhaust the machine's connections
_PROCESS_BYTES = 50_000_000  # of a rank's process itself


def rehearse(
    plan: Plan,
    *,
    num_steps: int = 5,
    allocate: bool = False,
    timeout_s: float | None = None,
    device: str = AUTO,
    progress: Callable[[str], None] = lambda _: None,
) -> Rehearsal:
    """Run `plan` on this machine, one process per rank, with waits of the planned durations instead of its ops.

    On accelerators, kernels of the planned durations replace the ops, and messages go between accelerators.

    Messages are real and as large as planned; loop, transport and watchdog are those of `Pipeline`. No process is left
    behind.

    Args:
        plan: The plan to run.
        num_steps: Steps to measure, after one to four to warm up: at least 32 micro-batches, if four have as many.
        allocate: Whether ranks allocate the memory that the plan needs, static bytes included.
        timeout_s: A rank that makes no progress for this long is ended; None: 20 simulated steps, at least 60 s.
        device: What each rank has: "cpu", the type of an accelerator, or "auto", which takes accelerators if there is
            one for each rank.
        progress: Called with a line of text at the start and after each step.

    Returns:
        The planned and the measured timeline, and the causes of the difference.

    Raises:
        PlanError: `check` refuses the plan.
        PipelineError: `Pipeline` would refuse the plan, the machine lacks the memory or devices, or a rank hangs or
            dies.
    """
    check(plan)
    kind = _refuse(plan, num_steps, allocate, timeout_s, device)
    planned = simulate(plan if kind == CPU else without_occupancy(plan))
    if timeout_s is None:
        timeout_s = max(20e-6 * planned.makespan_us, 60)
    steps = count_text(num_steps, "step")

    def step_ended(num_ended: int) -> None:
        number = num_ended - num_warm_ups(plan)
        if number >= 0:
            progress(f"step {number} of {num_steps} ended" if number else "warm-up ended")

    on = "" if kind == CPU else f" on {kind}"
    progress(
        f"starting {count_text(plan.num_ranks, 'process', 'es')}{on} for {steps} of {time_text(planned.makespan_us)}"
    )
    reports = run_ranks([plan], num_steps, allocate, timeout_s, step_ended, kind)
    timelines = [measured_timeline(plan, reports, step) for step in range(num_steps)]
    middle = sorted(range(num_steps), key=lambda step: timelines[step].makespan_us)[(num_steps - 1) // 2]
    return Rehearsal(
        planned,
        timelines[middle],
        tuple(timeline.makespan_us for timeline in timelines),
        tuple(_overhead(plan, report, middle) for report in reports),
        _links(timelines[middle]),
        tuple(
            MemoryUse(report.rank, planned.peak_memory_bytes[report.rank], report.held_bytes, report.process_bytes)
            for report in reports
            if report.held_bytes is not None
        ),
        kind,
    )


def rehearse_batches(
    plans: Sequence[Plan],
    *,
    timeout_s: float | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> BatchesRehearsal:
    """Run a step of each plan, one after another, in the same processes, on the CPU.

    It shows what batches with plans of their own cost: each plan is prepared while the one before it runs, as by
    `rota.Planner`. Waits, messages, loop and transport are those of `rehearse`.

    Args:
        plans: The plans of consecutive batches, for the same ranks.
        timeout_s: As for `rehearse`; None: 20 simulated steps of the longest plan, at least 60 s.
        progress: Called with a line of text at the start and after each step.

    Returns:
        The simulated and the measured makespan of each plan.

    Raises:
        PlanError: `check` refuses a plan.
        PipelineError: As for `rehearse`, or the plans are for different numbers of ranks.
    """
    if not plans:
        raise UsageError("there is no plan to rehearse; give one or more")
    for plan in plans:
        check(plan)
        _refuse(plan, 1, False, timeout_s, CPU)
        if plan.num_ranks != plans[0].num_ranks:
            raise UsageError(
                f"the plans have {plan.num_ranks} and {plans[0].num_ranks} ranks; give plans with the same number"
            )
    planned_us = tuple(simulate(plan).makespan_us for plan in plans)
    if timeout_s is None:
        timeout_s = max(20e-6 * max(planned_us), 60)

    def step_ended(num_ended: int) -> None:
        progress("warm-up ended" if num_ended == 1 else f"batch {num_ended - 1} of {len(plans)} ended")

    progress(f"starting {count_text(plans[0].num_ranks, 'process', 'es')} for {count_text(len(plans), 'batch', 'es')}")
    reports = run_ranks(plans, 1, False, timeout_s, step_ended, CPU)
    measured = tuple(measured_timeline(plan, reports, i).makespan_us for i, plan in enumerate(plans))
    return BatchesRehearsal(planned_us, measured)


def _refuse(plan: Plan, num_steps: int, allocate: bool, timeout_s: float | None, device: str) -> str:
    """Raise UsageError for problems that are known before a process is started; else the type of the devices."""
    placement = plan.placement
    if not isinstance(num_steps, int) or num_steps < 1:
        raise UsageError(f"num_steps is {num_steps!r}; give a whole number of 1 or more")
    if timeout_s is not None and not (isinstance(timeout_s, int | float) and 0 < timeout_s < math.inf):
        raise UsageError(f"timeout_s is {timeout_s!r}; give seconds above 0, or None for 20 simulated steps")
    if plan.num_ranks > _MOST_RANKS:
        raise UsageError(
            f"the plan has {plan.num_ranks:,} ranks, and one machine rehearses {_MOST_RANKS} at most; simulate it, or "
            f"rehearse the same schedule on fewer ranks"
        )
    refuse_unsupported(plan, placement.stage_edges, placement.num_stages)
    kind = device_type(device, plan.num_ranks)
    held, what = placement, f"{count_text(plan.num_ranks, 'rank')} that allocate the plan's memory"
    if allocate:
        for of_class in placement.classes:
            blocks_of(of_class)
    else:
        tasks = tuple(replace(task, held_bytes=0, peak_bytes=0) for task in placement.tasks)
        held, what = replace(placement, tasks=tasks, static_bytes=()), f"the messages of {plan.num_ranks} ranks"
    if kind != CPU:  # the ranks look how much their devices have
        return kind
    needed_bytes = sum(simulate(replace(plan, placement=held)).peak_memory_bytes)
    remedy = "rehearse without allocate, or with smaller sizes" if allocate else "plan with smaller messages"
    refuse_too_much(needed_bytes + plan.num_ranks * _PROCESS_BYTES, what, remedy)
    return kind


def without_occupancy(plan: Plan) -> Plan:
    """The plan without what messages cost their ranks, and without gaps between ops."""
    cluster = plan.placement.cluster
    links = tuple((a, b, _without_costs(link)) for a, b, link in cluster.links)
    cluster = replace(cluster, link=_without_costs(cluster.link), links=links, gap_us=0)
    return replace(plan, placement=replace(plan.placement, cluster=cluster))


def _without_costs(link: Link) -> Link:
    return Link(link.latency_us, link.bytes_per_us)


def measured_timeline(plan: Plan, reports: list[RankReport], step: int) -> Timeline:
    """All ranks' records of one step as a timeline.

    Messages leave when both sides are ready, where that is known, and arrive when their receiver has them.
    """
    steps = [report.steps[step] for report in reports]
    ready = {(route, position): ns for of_rank in steps for route, position, ns in of_rank.ready_ns}
    arrived = {(route, position): ns for of_rank in steps for route, position, ns in of_rank.arrived}
    records = []
    for rank, of_rank in enumerate(steps):
        sent = {(route, position): max(ns, ready.get((route, position), ns)) for route, position, ns in of_rank.sent}
        through = {column: arrived[column] for column in sent}
        records.append(Record(rank, 0, of_rank.starts_ns, of_rank.ends_ns, sent, through))
    origin_ns = min(of_rank.starts_ns[0] for of_rank in steps if of_rank.starts_ns)
    step_ends = []
    for of_rank in steps:
        for times_ns in of_rank.step_ends_ns:
            a, b, c, d = (max(ns - origin_ns + 500, 0) // 1000 for ns in times_ns)
            step_ends.append((a, b, c, d))
    return replace(merge(plan, records), step_ends_us=tuple(step_ends))


def _overhead(plan: Plan, report: RankReport, step: int) -> Overhead:
    late_us = [ns // 1000 for ns in report.steps[step].late_ns]
    worst = max(range(len(late_us)), key=late_us.__getitem__, default=None)
    if worst is None:
        return Overhead(report.rank, 0, None, 0)
    return Overhead(report.rank, sum(late_us), plan.orders[report.rank][worst], late_us[worst])


def _links(timeline: Timeline) -> tuple[LinkUse, ...]:
    messages: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    plan, column = timeline.plan, timeline.plan.placement.column
    for r, (route, starts, ends) in enumerate(
        zip(plan.placement.routes, timeline.sent_us, timeline.arrived_us, strict=True)
    ):
        of_pair, batches = messages.setdefault((route.sender, route.receiver), []), plan.microbatches_on(r)
        took_us = [end - start for start, end in zip(starts, ends, strict=True)]
        of_pair += zip(column(route.num_bytes, batches), column(route.duration_us, batches), took_us, strict=True)
    uses = []
    for pair, of_pair in sorted(messages.items()):
        sizes, planned, took = zip(*of_pair, strict=True)
        rates = sum(sizes) / max(sum(planned), 1), sum(sizes) / max(sum(took), 1)
        uses.append(LinkUse(*pair, len(sizes), sum(sizes), round(median(planned)), round(median(took)), *rates))
    return tuple(uses)
