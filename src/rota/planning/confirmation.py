"""`confirm`: measures the best candidates' own stages, whose costs were sums of their layers' so far."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rota.checking import check
from rota.errors import PlanError, SearchError
from rota.models import Stages, split
from rota.planning.answer import Answer, Confirmed
from rota.planning.evaluation import Found
from rota.planning.layout_bounds import placement_bound_us
from rota.profiling import profile, profile_here
from rota.runtime.losses import LossFn
from rota.units import count_text

_MOST = 3  # candidates, of different kinds

MakeBatch = Callable[[int], tuple[Any, Any]]


def confirm(
    answer: Answer,
    model: nn.Module | Stages,
    make_batch: MakeBatch,
    loss_fn: LossFn | None,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Answer:
    """The same answer, with its best candidates planned by the costs of their own stages, measured as they will run.

    The fastest as measured becomes the best, and its plan is checked. Ctrl-C ends the measuring: what was measured by
    then counts; if nothing was, the answer stays as it was and says so. An answer that Ctrl-C ended is not measured.

    Args:
        answer: What `autoplan` found.
        model: The model, or its stages made by hand, on the CPU.
        make_batch: Makes inputs and targets of one micro-batch, given its rows.
        loss_fn: Makes the loss of an output and a target; None: no loss.
        make_optimizer: Makes an optimizer of a list of parameters; None: no optimizer.
        report: Called with a line of text for each plan.

    Returns:
        The answer with `confirmed`, or with `is_unmeasured`.

    Raises:
        SearchError: Where no candidate fits as measured.
    """
    if answer.was_stopped:
        return replace(answer, is_unmeasured=True)
    how = model, make_batch, loss_fn, make_optimizer
    confirmed: list[Confirmed] = []
    usual, stopped_by = answer.usual, ""
    try:
        for found in (*answer.shown, *(found for found in answer.candidates if found not in answer.shown)):
            if len(confirmed) >= _MOST:
                break
            ranks = count_text(found.candidate.layout.num_ranks, "rank")
            report(f"measuring the stages of {found.schedule} on {ranks}")
            again = _measured(found, *how)
            try:
                check(again.plan)
            except PlanError as error:
                report(f"{found.schedule}: as measured, {error}")
                continue
            confirmed.append(Confirmed(found.makespan_us, again))
        if confirmed and isinstance(usual, Found):
            usual = _measured(usual, *how)
    except KeyboardInterrupt:
        stopped_by = "Ctrl-C"
        if not confirmed:
            return replace(answer, stopped_by=stopped_by, is_unmeasured=True)
    if not confirmed:
        raise SearchError(
            "none of the plans fits as its stages were measured; profile the layers again (--refresh), or plan with "
            "less memory than there is, to leave room"
        )
    confirmed.sort(key=lambda one: one.found.key)
    candidates = tuple(one.found for one in confirmed)
    return replace(answer, candidates=candidates, usual=usual, confirmed=tuple(confirmed), stopped_by=stopped_by)


def _measured(
    found: Found,
    model: nn.Module | Stages,
    make_batch: MakeBatch,
    loss_fn: LossFn | None,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None,
) -> Found:
    """The same orders on a placement with the stages' own measured costs."""
    candidate, layout = found.candidate, found.candidate.layout
    inputs, target = make_batch(layout.rows)
    stages = split(model, layout.num_stages, candidate.usage.cuts, example=inputs)
    how: dict[str, Any] = {
        "split_backward": candidate.splits_backward,
        "recompute": candidate.recomputed,
        "optimizer": make_optimizer,
    }
    batch = inputs, target, loss_fn
    if layout.num_ranks <= len(os.sched_getaffinity(0)) and layout.shape != "bidirectional":
        costs = profile(stages, *batch, ranks=layout.ranks, **how)
    else:  # they will run on other machines: on this one they would share cores
        costs = profile_here(stages, *batch, **how)
    candidate = replace(candidate, measured=costs)
    plan = replace(found.plan, placement=candidate.placement)
    return Found(candidate, found.schedule, plan, placement_bound_us(candidate.placement, layout.num_microbatches))
