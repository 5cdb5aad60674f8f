"""One plan of autoplan's answer in words: what it consists of, what it needs, and why it is slower than another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from rota.core.tasks import Kind, scalar
from rota.core.text import count_text, size_text, time_text
from rota.planning.choosing import SLOWER_BY_ROUNDS, Contender, advantage

NEGLIGIBLE = 0.001  # of a step: a smaller difference needs no reason
_ALSO = 0.3  # of the difference: a part as large as this is a reason too


def details(plan: Contender, num_ranks: int) -> list[str]:
    """The choices of which a plan consists, on a machine of `num_ranks`."""
    layout, cuts, num_stages = plan.candidate.layout, plan.candidate.usage.cuts, plan.candidate.layout.num_stages
    sizes = [b - a for a, b in pairwise(plan.candidate.boundaries)]
    several = f"{layout.shape}, {layout.stages_per_rank} per rank" if layout.stages_per_rank > 1 else layout.shape
    lines = [
        f"  ranks       {layout.num_ranks} per pipeline x {count_text(layout.num_replicas, 'replica')}: "
        f"{plan.num_processes} of {num_ranks}",
        f"  stages      {num_stages} ({several}), layers {_runs(sizes)}",
    ]
    if layout.has_copies:
        lines.append(
            f"  copies      half of the micro-batches enter at the last rank, so every stage is on two ranks and all "
            f"weights are held twice; the charts number the second copies {num_stages} to {2 * num_stages - 1}"
        )
    if cuts:
        num_cuts = len(plan.candidate.layers.cuts)
        lines.append(f"  cut before  {_runs(cuts)}; a layer is what lies between two of {num_cuts} possible cuts")
    return [
        *lines,
        f"  step        {count_text(layout.num_microbatches, 'micro-batch', 'es')} per replica, of "
        f"{count_text(layout.rows, 'row')} each",
        f"  recomputed  {_runs(sorted(plan.candidate.recomputed)) or 'nothing'}",
    ]


def ranks_text(plan: Contender) -> str:
    """How many ranks a plan is for, and of how many replicas if there are several."""
    layout = plan.candidate.layout
    ranks = count_text(layout.num_ranks, "rank")
    return ranks if layout.num_replicas == 1 else f"{ranks} x {layout.num_replicas} replicas"


def layout_text(plan: Contender) -> str:
    """A plan's schedule and layout: two plans of one schedule on the same ranks differ in the latter."""
    layout, num_recomputed = plan.candidate.layout, len(plan.candidate.recomputed)
    parts: list[str] = []
    if layout.has_copies:
        parts.append("bidirectional: all weights held twice")
    elif layout.shape != "chain":
        parts.append(layout.shape)
    if layout.stages_per_rank > 1:
        parts.append(f"{layout.stages_per_rank} stages per rank")
    parts.append(f"{count_text(layout.num_microbatches, 'micro-batch', 'es')} of {count_text(layout.rows, 'row')}")
    if num_recomputed:
        parts.append(f"{count_text(num_recomputed, 'stage')} recomputed")
    return f"{plan.schedule} on {ranks_text(plan)} ({', '.join(parts)})"


def short_ops(plan: Contender) -> str:
    """Says that a plan's ops are shorter than its messages, if they are."""
    placement = plan.plan.placement
    if not placement.routes:
        return ""
    op_us = median(scalar(task.duration_us) for task in placement.tasks)
    message_us = median(scalar(route.duration_us) for route in placement.routes)
    if op_us >= message_us:
        return ""
    return f"; its ops take {time_text(round(op_us))}, less than their messages, {time_text(round(message_us))}"


def fullest(plan: Contender) -> int:
    """The rank with the largest share of its limit; without limits the one that holds most."""
    limits = plan.plan.placement.cluster.limit_bytes
    peaks = plan.timeline.peak_memory_bytes
    shares = [peak / limit if limit else float(peak) for peak, limit in zip(peaks, limits, strict=True)]
    return shares.index(max(shares))


def memory_text(plan: Contender) -> str:
    """The peak memory of the fullest rank, and its limit."""
    rank = fullest(plan)
    limit = plan.plan.placement.cluster.limit_bytes[rank]
    peak = size_text(plan.timeline.peak_memory_bytes[rank])
    return peak if limit is None else f"{peak} of {size_text(limit)}"


def _runs(values: Sequence[object]) -> str:
    """The values, shortened if there are many."""
    text = " ".join(map(str, values[:32]))
    return text + (f" … ({len(values)})" if len(values) > 32 else "")


# --- why it is slower -------------------------------------------------------------------------------------------------


class StepParts(NamedTuple):
    """The parts of a step, as means over the ranks, in µs; they add up to the makespan.

    Forwards and backwards; recomputed forwards; waiting for other ranks; and the time after the last op of all ranks.
    The last two are the bubble, all idle time.
    """

    compute_us: float
    recompute_us: float
    waiting_us: float
    ending_us: float


def parts_of(plan: Contender) -> StepParts:
    """Divide a plan's step into its parts."""
    timeline, ranks, count = plan.timeline, plan.plan.num_ranks, plan.plan.num_microbatches
    last_us = max((ends[-1] for ends in timeline.ends_us if ends), default=0)
    recompute = sum(
        len(task.ranks) * scalar(task.duration_us) * len(plan.plan.placement.microbatches(task.stage, count))
        for task in plan.plan.placement.tasks
        if task.kind is Kind.R
    )
    busy, ending_us = sum(timeline.busy_us), timeline.makespan_us - last_us
    return StepParts((busy - recompute) / ranks, recompute / ranks, last_us - busy / ranks, ending_us)


def why_slower(plan: Contender, best: Contender) -> str:
    """The parts of the step that are longer than in the best plan, the largest first."""
    slower_us = plan.step_us - best.step_us
    if slower_us < -NEGLIGIBLE * best.step_us:
        merit = advantage(best, plan)
        return f"{slower_us / best.step_us:+.1%}, but " + (f"the best plan {merit}" if merit else SLOWER_BY_ROUNDS)
    if slower_us <= NEGLIGIBLE * best.step_us:
        more = plan.peak_bytes > best.peak_bytes
        return "equally fast" + (", but needs more memory" if more else ", on as many ranks or more")
    more_us = [a - b for a, b in zip(parts_of(plan), parts_of(best), strict=True)]
    texts = [_compute, _recompute, _waiting, _ending]
    order = sorted(range(4), key=lambda part: -more_us[part])
    reasons = [texts[part](plan, best) for part in order if more_us[part] >= _ALSO * slower_us]
    slower = f"{slower_us / best.step_us:+.1%}: "
    return slower + "; ".join(reasons or [texts[order[0]](plan, best)])


def _compute(plan: Contender, best: Contender) -> str:
    rows, best_rows = plan.candidate.layout.rows, best.candidate.layout.rows
    share = parts_of(plan).compute_us / max(parts_of(best).compute_us, 1) - 1
    if plan.num_processes < best.num_processes:
        return f"uses {count_text(plan.num_processes, 'rank')}, not {best.num_processes}: {share:+.0%} compute per rank"
    if rows != best_rows:
        return f"micro-batches of {count_text(rows, 'row')}, not {best_rows}: {share:+.0%} compute"
    if plan.candidate.splits_backward != best.candidate.splits_backward:
        return f"{'split' if plan.candidate.splits_backward else 'whole'} backward: {share:+.0%} compute"
    return f"{share:+.0%} compute"


def _recompute(plan: Contender, best: Contender) -> str:
    share = (parts_of(plan).recompute_us - parts_of(best).recompute_us) / max(parts_of(best).compute_us, 1)
    return f"recomputes {count_text(len(plan.candidate.recomputed), 'stage')}: {share:+.0%} compute"


def _waiting(plan: Contender, best: Contender) -> str:
    share, best_share = (parts_of(contender).waiting_us / contender.makespan_us for contender in (plan, best))
    text = f"ranks wait for {share:.1%} of the step (best plan: {best_share:.1%})"
    causes = ", ".join(_causes(plan, best))
    return f"{text}: {causes}" if causes else text


def _causes(plan: Contender, best: Contender) -> Iterator[str]:
    layout, other = plan.candidate.layout, best.candidate.layout
    if layout.num_microbatches < other.num_microbatches:
        yield f"fewer micro-batches ({layout.num_microbatches}, not {other.num_microbatches})"
    if layout.num_ranks > other.num_ranks:
        yield f"a longer pipeline ({layout.num_ranks} ranks, not {other.num_ranks})"
    if _unevenness(plan) > _unevenness(best) + 0.01:
        yield f"less balanced (busiest rank {_unevenness(plan):.0%} above average; best plan: {_unevenness(best):.0%})"
    if (layout.num_ranks, layout.num_microbatches) == (other.num_ranks, other.num_microbatches):
        if layout.stages_per_rank < other.stages_per_rank:
            yield f"fewer stages per rank ({layout.stages_per_rank}, not {other.stages_per_rank})"
        elif plan.candidate.splits_backward < best.candidate.splits_backward:
            yield "no separate W to fill the bubble"
        elif plan.schedule != best.schedule:
            yield f"schedule {plan.schedule}, not {best.schedule}"


def _unevenness(plan: Contender) -> float:
    """The share by which the busiest rank works longer than the mean."""
    busy = plan.timeline.busy_us
    return max(busy) * len(busy) / max(sum(busy), 1) - 1


def _ending(plan: Contender, best: Contender) -> str:
    ending, best_ending = (time_text(round(parts_of(contender).ending_us)) for contender in (plan, best))
    return f"all-reduce and optimizer {ending} after the last op, not {best_ending}"
