"""One plan of autoplan's answer in words: what it consists of, what it needs, and what its times are from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

from rota.core.units import count_text, size_text, time_text
from rota.planning.evaluation import Found
from rota.planning.layouts import Layout


def details(found: Found, num_ranks: int) -> list[str]:
    """The choices of which a plan consists, on a machine of `num_ranks`."""
    layout = found.candidate.layout
    sizes = [b - a for a, b in pairwise(found.candidate.boundaries)]
    several = f"{layout.shape}, {layout.stages_per_rank} per rank" if layout.stages_per_rank > 1 else layout.shape
    recomputed = sorted(found.candidate.recomputed)
    return [
        f"  ranks       {layout.num_ranks} per pipeline x {count_text(layout.num_replicas, 'replica')}: "
        f"{found.num_processes} of {num_ranks}",
        f"  stages      {layout.num_stages} ({several}), layers {_runs(sizes)}",
        *_both_ways(layout),
        *_cuts(found),
        f"  step        {count_text(layout.num_microbatches, 'micro-batch', 'es')} per replica, of "
        f"{count_text(layout.rows, 'row')} each",
        f"  recomputed  {_runs(recomputed) if recomputed else 'nothing'}",
    ]


def times_of(found: Found) -> str:
    """Whose measured times a plan's step is simulated from."""
    return "stage times" if found.steps is None else "op times measured in plan order"


def ranks_text(found: Found) -> str:
    """How many ranks a plan is for, and of how many replicas if there are several."""
    layout = found.candidate.layout
    ranks = count_text(layout.num_ranks, "rank")
    return ranks if layout.num_replicas == 1 else f"{ranks} x {layout.num_replicas} replicas"


def layout_text(found: Found) -> str:
    """A plan's schedule and layout: two plans of one schedule on the same ranks differ in the latter."""
    layout, again = found.candidate.layout, len(found.candidate.recomputed)
    parts: list[str] = []
    if layout.has_copies:
        parts.append("bidirectional: all weights held twice")
    elif layout.shape != "chain":
        parts.append(layout.shape)
    if layout.stages_per_rank > 1:
        parts.append(f"{layout.stages_per_rank} stages per rank")
    parts.append(f"{count_text(layout.num_microbatches, 'micro-batch', 'es')} of {count_text(layout.rows, 'row')}")
    if again:
        parts.append(f"{count_text(again, 'stage')} recomputed")
    return f"{found.schedule} on {ranks_text(found)} ({', '.join(parts)})"


def _both_ways(layout: Layout) -> list[str]:
    """What it means that a plan is bidirectional, and how its chart numbers the stages."""
    if not layout.has_copies:
        return []
    n = layout.num_stages
    return [
        f"  copies      half of the micro-batches enter at the last rank, so every stage is on two ranks and all "
        f"weights are held twice; the charts number the second copies {n} to {2 * n - 1}"
    ]


def _cuts(found: Found) -> list[str]:
    """Where each stage begins, and what counts as a layer."""
    cuts, every = found.candidate.usage.cuts, found.candidate.layers.cuts
    if not cuts:
        return []
    return [
        f"  cut before  {_runs(cuts)}; a layer is what lies between two possible cuts: the first of "
        f"{len(every) + 1} is everything before {every[0]}, and the last is everything from {every[-1]} on",
    ]


def short_ops(found: Found) -> str:
    """Says that a plan's ops are shorter than its messages, if they are."""
    placement = found.plan.placement
    if not placement.routes:
        return ""
    op_us = median(task.duration_us for task in placement.tasks)
    message_us = median(route.duration_us for route in placement.routes)
    if op_us >= message_us:
        return ""
    return f"; its ops take {time_text(round(op_us))}, less than their messages, {time_text(round(message_us))}"


def inflation(found: Found) -> str:
    """How much longer a plan's ops took in place, in plan order with all ranks busy, than its layers by themselves."""
    if found.steps is None:
        return ""
    alone = replace(found.candidate, measured=None).placement
    in_place_us, alone_us = (
        sum(len(task.ranks) * task.duration_us for task in placement.tasks)
        for placement in (found.plan.placement, alone)
    )
    if not alone_us:
        return ""
    change = in_place_us / alone_us - 1
    than_alone = f"{'less' if change < 0 else 'more'} time in place than its layers one by one"
    return f"; its ops take {abs(change):.0%} {than_alone}"


def fullest(found: Found) -> int:
    """The rank with the largest share of its limit; without limits the one that holds most."""
    limits = found.plan.placement.cluster.limit_bytes
    peaks = found.timeline.peak_memory_bytes
    shares = [peak / limit if limit else float(peak) for peak, limit in zip(peaks, limits, strict=True)]
    return shares.index(max(shares))


def memory_text(found: Found) -> str:
    """The peak memory of the fullest rank, and its limit."""
    rank = fullest(found)
    limit = found.plan.placement.cluster.limit_bytes[rank]
    peak = size_text(found.timeline.peak_memory_bytes[rank])
    return peak if limit is None else f"{peak} of {size_text(limit)}"


def _runs(values: Sequence[object]) -> str:
    """The values, shortened if there are many."""
    text = " ".join(map(str, values[:32]))
    return text + (f" … ({len(values)})" if len(values) > 32 else "")
