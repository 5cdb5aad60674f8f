"""Why one plan is slower than another: the parts of their steps, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rota.core.tasks import Kind
from rota.core.units import count_text, time_text
from rota.planning.choosing import SLOWER_BY_ROUNDS, advantage
from rota.planning.evaluation import Found

NEGLIGIBLE = 0.001  # of a step: a smaller difference needs no reason
_ALSO = 0.3  # of the difference: a part as large as this is a reason too


class StepParts(NamedTuple):
    """The parts of a step, as means over the ranks, in µs; they add up to the makespan.

    Forwards and backwards; recomputed forwards; waiting for other ranks; and the time after the last op of all ranks.
    The last two are the bubble, all idle time.
    """

    compute_us: float
    again_us: float
    waiting_us: float
    ending_us: float


def parts_of(found: Found) -> StepParts:
    """Divide a plan's step into its parts."""
    timeline, ranks = found.timeline, found.plan.num_ranks
    last_us = max((ends[-1] for ends in timeline.ends_us if ends), default=0)
    again = sum(
        len(task.ranks) * task.duration_us * len(found.plan.placement.microbatches(task.stage, _count(found)))
        for task in found.plan.placement.tasks
        if task.kind is Kind.R
    )
    busy = sum(timeline.busy_us)
    return StepParts((busy - again) / ranks, again / ranks, last_us - busy / ranks, timeline.makespan_us - last_us)


def _count(found: Found) -> int:
    return found.plan.num_microbatches


def why_slower(found: Found, best: Found) -> str:
    """The parts of the step that are longer than in the best plan, the largest first."""
    slower_us = found.step_us - best.step_us
    if slower_us < -NEGLIGIBLE * best.step_us:
        what = advantage(best, found)
        return f"{slower_us / best.step_us:+.1%}, but " + (f"the best plan {what}" if what else SLOWER_BY_ROUNDS)
    if slower_us <= NEGLIGIBLE * best.step_us:
        more = found.peak_bytes > best.peak_bytes
        return "equally fast" + (", but needs more memory" if more else ", on as many ranks or more")
    mine, theirs = parts_of(found), parts_of(best)
    more_us = [a - b for a, b in zip(mine, theirs, strict=True)]
    texts = [_compute, _again, _waiting, _ending]
    order = sorted(range(4), key=lambda part: -more_us[part])
    reasons = [texts[part](found, best) for part in order if more_us[part] >= _ALSO * slower_us]
    slower = f"{slower_us / best.step_us:+.1%}: "
    return slower + "; ".join(reasons or [texts[order[0]](found, best)])


def _compute(found: Found, best: Found) -> str:
    mine, theirs = found.candidate.layout, best.candidate.layout
    share = parts_of(found).compute_us / max(parts_of(best).compute_us, 1) - 1
    used, others = mine.num_ranks * mine.num_replicas, theirs.num_ranks * theirs.num_replicas
    if used < others:
        return f"uses {count_text(used, 'rank')}, not {others}: {share:+.0%} compute per rank"
    if mine.rows != theirs.rows:
        return f"micro-batches of {count_text(mine.rows, 'row')}, not {theirs.rows}: {share:+.0%} compute"
    if found.candidate.splits_backward != best.candidate.splits_backward:
        return f"{'split' if found.candidate.splits_backward else 'whole'} backward: {share:+.0%} compute"
    return f"{share:+.0%} compute"


def _again(found: Found, best: Found) -> str:
    share = (parts_of(found).again_us - parts_of(best).again_us) / max(parts_of(best).compute_us, 1)
    return f"recomputes {count_text(len(found.candidate.recomputed), 'stage')}: {share:+.0%} compute"


def _waiting(found: Found, best: Found) -> str:
    mine, theirs = parts_of(found).waiting_us, parts_of(best).waiting_us
    text = f"ranks wait for {mine / found.makespan_us:.1%} of the step (best plan: {theirs / best.makespan_us:.1%})"
    causes = list(_causes(found, best))
    return f"{text}: {', '.join(causes)}" if causes else text


def _causes(found: Found, best: Found) -> Iterator[str]:
    """Causes of waiting longer."""
    mine, theirs = found.candidate.layout, best.candidate.layout
    if mine.num_microbatches < theirs.num_microbatches:
        yield f"fewer micro-batches ({mine.num_microbatches}, not {theirs.num_microbatches})"
    if mine.num_ranks > theirs.num_ranks:
        yield f"a longer pipeline ({mine.num_ranks} ranks, not {theirs.num_ranks})"
    if _unevenness(found) > _unevenness(best) + 0.01:
        yield f"less balanced (busiest rank {_unevenness(found):.0%} above average; best plan: {_unevenness(best):.0%})"
    if (mine.num_ranks, mine.num_microbatches) == (theirs.num_ranks, theirs.num_microbatches):
        if mine.stages_per_rank < theirs.stages_per_rank:
            yield f"fewer stages per rank ({mine.stages_per_rank}, not {theirs.stages_per_rank})"
        elif found.candidate.splits_backward < best.candidate.splits_backward:
            yield "no separate W to fill the bubble"
        elif found.schedule != best.schedule:
            yield f"schedule {found.schedule}, not {best.schedule}"


def _unevenness(found: Found) -> float:
    """The share by which the busiest rank works longer than the mean."""
    busy = found.timeline.busy_us
    return max(busy) * len(busy) / max(sum(busy), 1) - 1


def _ending(found: Found, best: Found) -> str:
    mine, theirs = parts_of(found).ending_us, parts_of(best).ending_us
    return f"all-reduce and optimizer {time_text(round(mine))} after the last op, not {time_text(round(theirs))}"
