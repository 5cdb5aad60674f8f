"""`autoplan`: cuts, placements, micro-batch sizes, recomputation, replicas and schedules, chosen together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from rota.checking import check
from rota.errors import PlacementError, SearchError
from rota.layers import LayerCosts
from rota.planning.answer import Answer, Counts
from rota.planning.candidate import Asked, Candidate
from rota.planning.deadline import Clock, Progress
from rota.planning.evaluation import Found, Misfit, evaluate, families
from rota.planning.finalists import search_finalists
from rota.planning.layouts import cuts
from rota.planning.machine import Machine
from rota.planning.sweep import Sweep
from rota.stopping import ended_by_ctrl_c, watched
from rota.units import size_text


def autoplan(
    profiles: Mapping[int, LayerCosts],
    machine: Machine,
    batch_rows: int,
    *,
    inference: bool = False,
    recompute: bool = True,
    pipeline_ranks: int | None = None,
    copies: bool = True,
    time_limit_s: float = 60.0,
    progress: Callable[[Progress], None] | None = None,
) -> Answer:
    """The fastest way found to do steps of `batch_rows` rows of a model on a machine, and why others are slower.

    `profiles`: its layers, by rows of a micro-batch (`rota.profiles.Profile` is one). All that there is to choose is
    chosen together: how many ranks make a pipeline and how many of these replicas there are, where the model is cut,
    how many stages a rank has and in which shape, the rows of a micro-batch, what is recomputed, and the schedule.
    Never slower, as simulated, than any named schedule on equal layers, with nothing recomputed or everything, unless
    time runs out: then the answer says so. With the search extra the best candidates' orders are searched, too.

    Without `recompute` no stage does: PyTorch's schedule CSV, and so torchtitan, cannot say it. With `pipeline_ranks`
    every pipeline has so many ranks. Without `copies` no stage is on two ranks, as in pipelines of both directions; nor
    is any on a machine whose links have no rate, as it is not known there what summing their gradients costs.

    Ctrl-C ends it with the best so far. So does an error that `progress` raises: it is warned of and told in
    `stopped_by`, and raised where there is no plan yet. The same on every run where it ends by itself. Raises
    PlacementError for what cannot be asked, and SearchError where nothing was found that fits, with what would.
    """
    if not isinstance(profiles, Mapping):
        raise PlacementError(
            f"profiles is a {type(profiles).__name__}; give a dict of layers by rows: {{rows: layers}}"
        )
    if not 0 < time_limit_s < math.inf:
        raise SearchError(f"time_limit_s is {time_limit_s!r}; give a number of seconds above 0")
    asked = Asked.checked(profiles, machine, batch_rows, inference, recompute, pipeline_ranks, copies)
    clock = Clock(time_limit_s, progress)
    sweep = Sweep(asked, clock)
    with ended_by_ctrl_c(clock):
        with watched(lambda: clock.left_s <= 0):
            sweep.run()
            search_finalists(sweep)
        best = sweep.best
        if best is None:
            raise clock.progress_error or _nothing_fits(sweep)
        usual = usual_plan(best)
    check(best.plan)
    counts = Counts(sweep.num_layouts, sweep.num_pruned, sweep.num_misfits, sweep.num_left, sweep.num_plans)
    found = sorted(sweep.found.values(), key=lambda found: found.key)
    return Answer(asked, tuple(found), usual, counts, sweep.bound_us, clock.elapsed_s, clock.stopped_by, clock.ran_out)


def usual_plan(best: Found) -> Found | Misfit | None:
    """1F1B on equal layers, one stage a rank, with the ranks, replicas and micro-batches of the best plan."""
    asked, layout = best.candidate.asked, replace(best.candidate.layout, shape="chain", stages_a_rank=1)
    if asked.inference:
        return None
    layout = replace(layout, recompute="none")
    boundaries = cuts(best.candidate.layers, layout, asked.machine)[0]
    one_f_one_b = next(family for family in families(layout, False) if family.name == "1f1b")
    return evaluate(Candidate(asked, layout, boundaries), one_f_one_b, math.inf)


def _nothing_fits(sweep: Sweep) -> SearchError:
    """With the smallest memory that would do, of all that was looked at, and where."""
    ran_out = sweep.clock.ran_out or sweep.num_left > 0
    closest = sweep.closest()
    if closest is None:
        return SearchError(
            f"found no plan in {sweep.clock.elapsed_s:.0f} s; give more time, or fewer numbers of rows to choose from"
        )
    candidate, layout = closest.candidate, closest.candidate.layout
    again = len(candidate.recomputed)
    recomputing = "full recomputation" if again == layout.num_stages else f"{again} recomputed stages"
    rows = f"micro-batches of {layout.rows} row{'s' if layout.rows > 1 else ''}"
    smaller = "smaller micro-batches (--rows), " if min(sweep.asked.profiles) > 1 else ""
    # What was not looked at may need less.
    nothing = (
        f"found nothing that fits in {sweep.clock.elapsed_s:.0f} s, with {sweep.num_left:,} of {sweep.num_layouts:,} "
        f"layouts not looked at: give a longer --time-limit. So far the least"
        if ran_out
        else "found nothing that fits: the least"
    )
    return SearchError(
        f"{nothing} is {closest.schedule} on {layout.num_ranks} ranks x {layout.num_replicas}, "
        f"{rows}, with {recomputing if again else 'nothing recomputed'}, where rank {closest.rank} needs "
        f"{size_text(closest.num_bytes)}, {size_text(closest.over_bytes)} over its limit; give "
        f"--memory {_at_least(closest.num_bytes)}, {smaller}or more ranks"
    )


def _at_least(num_bytes: int) -> str:
    """43098000000 -> "43.1GB": rounded up, as the command line takes it."""
    step = 10 ** max(len(str(num_bytes)) - 3, 0)
    return size_text(-(-num_bytes // step) * step).replace(" ", "")
