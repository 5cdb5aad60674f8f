"""How much two runs differ: losses, outputs, gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from rota.verifying.matching import Matching, Place, equal_elements
from rota.verifying.report import ParameterDifference, largest_of, nan_is_largest
from rota.verifying.unsplit import Unsplit

_SMALL = 1e-3  # of the largest gradient: smaller ones are rounding, such as those of a bias that softmax ignores


def relative(expected: float, actual: float) -> float:
    """The difference of two numbers relative to the first. If only one of them is NaN or infinite, it is inf."""
    if expected == actual or (math.isnan(expected) and math.isnan(actual)):
        return 0.0
    if not (math.isfinite(expected) and math.isfinite(actual)):
        return math.inf
    return abs(expected - actual) / max(abs(expected), 1e-12)


def compare_outputs(unsplit: Sequence[Sequence[torch.Tensor]], split: Sequence[Sequence[torch.Tensor]]) -> float | None:
    """The largest relative difference of tensors with rows; None if the outputs differ in structure."""
    if len({len(tensors) for tensors in (*unsplit, *split)}) != 1:
        return None
    differences: list[float] = []
    for leaf in range(len(unsplit[0])):
        expected, actual = (_cat([tensors[leaf] for tensors in outputs]) for outputs in (unsplit, split))
        if expected is None or actual is None or expected.shape != actual.shape:
            continue  # a number, or a tensor whose shape changes with the micro-batch
        differences.append(_difference(expected, actual, _largest(expected)))
    return largest_of(differences) if differences else None


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
    differences = []
    for parameter in matching.parameters:
        expected = unsplit.gradient(parameter.name)
        scale = max(_largest(expected), _SMALL * largest)
        at_places = [
            ParameterDifference(parameter.name, stage, _difference(expected, next(gradients), scale))
            for stage, _ in parameter.places
        ] or [ParameterDifference(parameter.name, None, 0.0 if expected is None else math.inf)]
        differences.append(max(at_places, key=lambda difference: nan_is_largest(difference.relative)))
    for stage, name in matching.unknown:
        differences.append(ParameterDifference(name, stage, 0.0 if next(gradients) is None else math.inf))
    return tuple(differences)


def places(matching: Matching) -> list[Place]:
    """All places of parameters, in the order in which `compare_gradients` takes their gradients."""
    return [place for parameter in matching.parameters for place in parameter.places] + matching.unknown


def _largest(tensor: torch.Tensor | None) -> float:
    """The largest magnitude of its finite elements."""
    if tensor is None or not tensor.numel():
        return 0.0
    return float(tensor.detach().abs().nan_to_num(nan=0.0, posinf=0.0).max())


def _difference(expected: torch.Tensor | None, actual: torch.Tensor | None, scale: float) -> float:
    if expected is None or actual is None:  # an optimizer with weight decay changes what has zeros, not what has None
        return 0.0 if expected is actual else math.inf
    if not expected.numel():
        return 0.0
    expected, actual = expected.detach(), actual.detach().to(expected.device)
    difference = float((expected - actual).abs().masked_fill(equal_elements(expected, actual), 0.0).max())
    if not math.isfinite(difference):
        return math.nan  # inf says that there is no gradient
    return difference / scale if scale else (math.inf if difference else 0.0)
