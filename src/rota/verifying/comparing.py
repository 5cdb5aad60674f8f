"""How much two runs differ: losses, outputs, gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from rota.verifying.matching import Matching, Place, equal_elements
from rota.verifying.report import ParameterDifference, largest_of
from rota.verifying.unsplit import Unsplit

_SMALL = 1e-3  # of the largest gradient: smaller ones are rounding, such as those of a bias that softmax ignores


def relative(one: float, other: float) -> float:
    """The difference of two numbers relative to the first. If only one of them is NaN or infinite, it is inf."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), 1e-12)


def compare_outputs(unsplit: Sequence[Sequence[torch.Tensor]], split: Sequence[Sequence[torch.Tensor]]) -> float | None:
    """The largest relative difference of tensors with rows; None if the outputs differ in structure."""
    if len({len(each) for each in (*unsplit, *split)}) != 1:
        return None
    found: list[float] = []
    for leaf in range(len(unsplit[0])):
        one, other = (_cat([each[leaf] for each in of]) for of in (unsplit, split))
        if one is None or other is None or one.shape != other.shape:
            continue  # a number, or a tensor whose shape changes with the micro-batch
        found.append(_difference(one, other, _largest(one)))
    return largest_of(found) if found else None


def _cat(parts: list[torch.Tensor]) -> torch.Tensor | None:
    if not all(part.dim() and part.is_floating_point() for part in parts):
        return None
    return torch.cat(parts) if len({part.shape[1:] for part in parts}) == 1 else None


def compare_gradients(
    matching: Matching, unsplit: Unsplit, split: Iterable[torch.Tensor | None]
) -> tuple[ParameterDifference, ...]:
    """The largest difference of each parameter over its places. `split`: gradients in the order of `places`."""
    gradients = iter(split)
    largest = max((_largest(unsplit.gradient(parameter.name)) for parameter in matching.parameters), default=0.0)
    found = []
    for parameter in matching.parameters:
        here = unsplit.gradient(parameter.name)
        scale = max(_largest(here), _SMALL * largest)
        differences = [
            ParameterDifference(parameter.name, stage, _difference(here, next(gradients), scale))
            for stage, _ in parameter.places
        ]
        if not differences:
            there = 0.0 if here is None else math.inf
            differences = [ParameterDifference(parameter.name, None, there)]
        found.append(max(differences, key=lambda each: math.inf if math.isnan(each.relative) else each.relative))
    for stage, name in matching.unknown:
        gradient = next(gradients)
        found.append(ParameterDifference(name, stage, 0.0 if gradient is None else math.inf))
    return tuple(found)


def places(matching: Matching) -> list[Place]:
    """All places of parameters, in the order in which `compare_gradients` takes their gradients."""
    return [place for parameter in matching.parameters for place in parameter.places] + matching.unknown


def _largest(tensor: torch.Tensor | None) -> float:
    """The largest magnitude of its finite elements."""
    if tensor is None or not tensor.numel():
        return 0.0
    return float(tensor.detach().abs().nan_to_num(nan=0.0, posinf=0.0).max())


def _difference(one: torch.Tensor | None, other: torch.Tensor | None, scale: float) -> float:
    if one is None or other is None:  # an optimizer with weight decay changes what has zeros, not what has None
        return 0.0 if one is other else math.inf
    if not one.numel():
        return 0.0
    one, other = one.detach(), other.detach().to(one.device)
    difference = float((one - other).abs().masked_fill(equal_elements(one, other), 0.0).max())
    if not math.isfinite(difference):
        return math.nan  # inf says that there is no gradient
    return difference / scale if scale else (math.inf if difference else 0.0)
