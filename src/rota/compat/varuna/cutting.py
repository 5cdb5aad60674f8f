"""A model cut at its CutPoints into Varuna's stages, each with its own weights and one output; and their plan."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.errors import SplitError
from rota.core.placing import place
from rota.core.plan import Plan
from rota.cutting import balanced, merge
from rota.models import CutPoint, Stages, split
from rota.models.cutpoint import find_cut_points
from rota.models.randomness import random_state_kept
from rota.schedules import varuna

_SHARE = "register a Parameter of its own for each side and give shared_weights=[(one name, the other)]"


def cut(
    model: nn.Module,
    num_stages: int,
    shared_weights: Collection[tuple[str, str]],
    cuts: list[int] | None,
    sample: Mapping[str, Any],
) -> Stages:
    """Cut at the CutPoints with the numbers `cuts`, in call order; None: evenly. `sample`: inputs of the forward.

    Raises SplitError, also if stages share a weight that is not in `shared_weights`, or if a stage reads the output of
    one that is not its neighbour.
    """
    stages = split(model, num_stages, cuts, example=sample, direct_skips=True)
    share(model, shared_weights, stages.modules)  # a model with shared weights would have only one of their names
    named = {name for pair in shared_weights for name in pair}
    for tie in stages.ties:
        for stage, name in tie:
            if name not in named and len({stage for stage, _ in tie}) > 1:
                elsewhere = " and ".join(f"{other!r} in stage {s}" for s, other in tie if s != stage)
                raise SplitError(f"stage {stage} has the weight {name!r}, which is also {elsewhere}; {_SHARE}")
    for edge in stages.edges:
        if edge.target != edge.source + 1:
            raise SplitError(
                f"stage {edge.target} uses what stage {edge.source} makes, past the stages between; let it go through "
                f"the CutPoints, compute it again, or cut elsewhere"
            )
    return stages


def cuts_by(costs: Costs, num_stages: int, num_cut_points: int) -> list[int]:
    """The CutPoints to cut at, from the costs of the pieces between CutPoints."""
    if costs.num_stages != num_cut_points + 1:
        raise SplitError(
            f"costs are those of {costs.num_stages} pieces, but {num_cut_points} CutPoints make {num_cut_points + 1}; "
            f"give one for each"
        )
    return [boundary - 1 for boundary in boundaries(costs, num_stages)[1:-1]]


def boundaries(costs: Costs, num_stages: int) -> list[int]:
    """The cut of pieces into stages with the fastest slowest stage; all stages but the last recompute."""
    num_pieces = costs.num_stages
    if not 0 < num_stages <= num_pieces:
        raise SplitError(f"{num_stages} stages out of {num_pieces} pieces; add CutPoints, or make fewer stages")
    if num_stages == 1:
        return [0, num_pieces]
    pairs = [*zip(costs.forward_us, costs.backward_us, strict=True)]
    times = [max(2 * forward + backward, 1) for forward, backward in pairs]  # no stage may be empty
    cuts = ([*balanced(times[:last], num_stages - 1), num_pieces] for last in range(num_stages - 1, num_pieces))

    def how_uneven(cut: list[int]) -> tuple[int, int]:
        stage_us = [sum(times[slice(*part)]) for part in pairwise(cut[:-1])]
        stage_us.append(sum(map(sum, pairs[cut[-2] :])))
        return max(stage_us), sum(us * us for us in stage_us)

    return min(cuts, key=how_uneven)


def stage_costs(costs: Costs, num_stages: int) -> Costs:
    """Costs of the stages that these pieces are cut into; all but the last recompute, from what they received."""
    merged = merge(costs, boundaries(costs, num_stages))
    crossing = merged.boundary_bytes
    received = (0, *((crossing,) * (num_stages - 1) if isinstance(crossing, int) else crossing))
    return replace(
        merged,
        recompute_us=(*merged.forward_us[:-1], None),
        checkpoint_bytes=tuple(map(min, received, merged.activation_bytes)),
    )


@lru_cache(maxsize=32)  # a pipeline knows its plans by their identity
def plan_of(num_stages: int, num_microbatches: int, costs: Costs | None = None, cluster: Cluster | None = None) -> Plan:
    """Varuna's schedule as a plan: the same order for all costs; None: its own ticks, 1 for F and R, 2 for B."""
    if costs is None:
        costs = Costs.uniform(num_stages, 1, 2, recompute_us=(*(1,) * (num_stages - 1), None))
    return varuna(place(costs, cluster or Cluster.uniform(num_stages)), num_microbatches)


def share(model: nn.Module, pairs: Collection[tuple[str, str]], stages: Iterable[nn.Module] = ()) -> None:
    """Make each pair of named weights one parameter, with the first one's value, in the model and its stages.

    Raises SplitError.
    """
    everywhere = [inner for module in (model, *stages) for inner in module.modules()]
    for pair in pairs:
        if isinstance(pair, str) or len(pair) != 2:
            raise SplitError(f"shared_weights has {pair!r}; give pairs of parameter names")
        kept, dropped = (_parameter(model, name) for name in pair)
        if (kept.shape, kept.dtype) != (dropped.shape, dropped.dtype):
            both = zip(pair, (kept, dropped), strict=True)
            sizes = " and ".join(f"{name!r} is {[*p.shape]}, {p.dtype}" for name, p in both)
            raise SplitError(f"{sizes}, so they cannot be shared; make them alike")
        for module in everywhere:
            for name, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
                if parameter is dropped:
                    module.register_parameter(name, kept)


def _parameter(model: nn.Module, name: str) -> nn.Parameter:
    named = dict(model.named_parameters(remove_duplicate=False))
    if name not in named:
        close = get_close_matches(name, named, n=1)
        hint = f", did you mean {close[0]!r}?" if close else "; see model.named_parameters()"
        raise SplitError(f"shared_weights has {name!r}, but the model has no such parameter{hint}")
    return named[name]


@torch.no_grad()
def dry_run(model: nn.Module, inputs: Mapping[str, Any], num_examples: int) -> int:
    """Run one forward to check the inputs of CutPoints; returns the number of CutPoints. The model does not change.

    Raises SplitError unless each CutPoint is called once, with one tensor with the examples along dim 0.
    """
    names = find_cut_points(model)
    called: set[CutPoint] = set()

    def look(cut_point: CutPoint, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name, values = names[cut_point], [*args, *kwargs.values()]
        if cut_point in called:
            raise SplitError(f"CutPoint {name} is called twice; each marks one place: make one for every call")
        called.add(cut_point)
        activation = values[0] if len(values) == 1 else values
        if not isinstance(activation, torch.Tensor):
            raise SplitError(f"CutPoint {name} is given a {type(activation).__name__}; give it one tensor")
        if activation.dim() == 0 or activation.shape[0] != num_examples:
            raise SplitError(
                f"CutPoint {name} is given a tensor of shape {[*activation.shape]} for {num_examples} examples; give "
                f"it one with the examples along dim 0"
            )

    hooks = [cut_point.register_forward_pre_hook(look, with_kwargs=True) for cut_point in names]
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with random_state_kept(model):
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
        for buffer, value in before:
            buffer.copy_(value)
    return len(called)
