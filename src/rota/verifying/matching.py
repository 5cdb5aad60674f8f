"""Which tensors and modules of the stages correspond to those of the unsplit model.

By identity if the stages have the model's own tensors; else by name; else, for stages written by hand, by equal values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from rota.models import Stages
from rota.runtime.reducing.sharded_stages import is_sharded

Place: TypeAlias = tuple[int, str]  # a stage, and the name in its module


class Matched(NamedTuple):
    """A tensor of the unsplit model by its first name, and all its places in the stages."""

    name: str
    places: tuple[Place, ...]
    #: Whether the stages have several tensors for it, which no gradient sums up.
    is_untied: bool


class Matching(NamedTuple):
    """How the unsplit model and the stages correspond. `unknown`: the stages' parameters that the model lacks."""

    parameters: list[Matched]
    buffers: list[Matched]
    unknown: list[Place]
    #: By stage: the name of each module in the unsplit model, by its name in the stage.
    modules: list[dict[str, str]]


def match(model: nn.Module, stages: Stages) -> Matching:
    """How the tensors and modules of `model` correspond to those of `stages`."""
    parameters, unknown = _match_tensors(
        [*model.named_parameters(remove_duplicate=False)],
        [((s, name), p) for s, module in enumerate(stages.modules) for name, p in module.named_parameters()],
    )
    buffers, _ = _match_tensors(
        [*model.named_buffers(remove_duplicate=False)],
        [((s, name), b) for s, module in enumerate(stages.modules) for name, b in module.named_buffers()],
        by_values=False,
    )
    return Matching(parameters, buffers, unknown, _match_modules(model, stages, parameters))


def _match_tensors(
    of_model: list[tuple[str, torch.Tensor]], of_stages: list[tuple[Place, torch.Tensor]], by_values: bool = True
) -> tuple[list[Matched], list[Place]]:
    names: dict[torch.Tensor, list[str]] = {}
    for name, tensor in of_model:
        names.setdefault(tensor, []).append(name)
    owner_by_name, are_names_ours = dict(of_model), _are_names_ours(dict(of_model), of_stages)
    matches: dict[torch.Tensor, list[tuple[Place, torch.Tensor]]] = {tensor: [] for tensor in names}
    unmatched: list[tuple[Place, torch.Tensor]] = []
    for place, tensor in of_stages:
        owner = tensor if tensor in names else _of_name(place, tensor, owner_by_name, are_names_ours)
        (unmatched if owner is None else matches[owner]).append((place, tensor))
    if by_values:
        unmatched = _match_values(matches, unmatched)
    matched = [
        Matched(names[tensor][0], tuple(place for place, _ in places), len({id(t) for _, t in places}) > 1)
        for tensor, places in matches.items()
    ]
    return matched, [place for place, _ in unmatched]


def _are_names_ours(owner_by_name: dict[str, torch.Tensor], of_stages: list[tuple[Place, torch.Tensor]]) -> bool:
    """Whether the stages name all their tensors as the model does; if they number layers from 0, two names clash."""
    named: dict[str, torch.Tensor] = {}
    for (_, name), tensor in of_stages:
        owner = owner_by_name.get(name)
        if owner is None or owner.shape != tensor.shape or named.setdefault(name, tensor) is not tensor:
            return False
    return True


def _of_name(
    place: Place, tensor: torch.Tensor, owner_by_name: dict[str, torch.Tensor], are_names_ours: bool
) -> torch.Tensor | None:
    owner = owner_by_name.get(place[1])
    if owner is None or owner.shape != tensor.shape:
        return None
    has_no_values = owner.is_meta or tensor.is_meta or is_sharded(tensor)
    return owner if are_names_ours or has_no_values or _is_equal(owner, tensor) else None


def _match_values(
    matches: dict[torch.Tensor, list[tuple[Place, torch.Tensor]]], unmatched: list[tuple[Place, torch.Tensor]]
) -> list[tuple[Place, torch.Tensor]]:
    """Match each unmatched tensor with the first one of equal values; returns those that remain."""
    for owner, places in matches.items():
        equal = next((i for i, (_, tensor) in enumerate(unmatched) if not places and _is_equal(owner, tensor)), None)
        if equal is not None:
            places.append(unmatched.pop(equal))
    # A second copy of a tensor that is matched already: its tie was cut.
    remaining: list[tuple[Place, torch.Tensor]] = []
    for place, tensor in unmatched:
        copies = (places for o, places in matches.items() if places and tensor.dim() > 1 and _is_equal(o, tensor))
        next(copies, remaining).append((place, tensor))
    return remaining


def _is_equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if tensor.is_meta or other.is_meta or is_sharded(tensor) or is_sharded(other) or tensor.shape != other.shape:
        return False
    return bool(equal_elements(tensor.detach(), other.detach().to(tensor.dtype)).all())


def equal_elements(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Which elements of two tensors of one shape are equal; NaN is equal to NaN here."""
    return (a == b) | (a.isnan() & b.isnan())


# --- modules ----------------------------------------------------------------------------------------------------------


def _match_modules(model: nn.Module, stages: Stages, parameters: Iterable[Matched]) -> list[dict[str, str]]:
    names = {module: name for name, module in model.named_modules()}
    matched: list[dict[str, str]] = [{} for _ in stages.modules]
    for stage, module in enumerate(stages.modules):
        for name, inner in module.named_modules():
            if inner in names and name:
                matched[stage][name] = names[inner]
    for parameter in parameters:
        for stage, own in parameter.places:
            for name, own_name in _ancestors(parameter.name, own):
                same_type = type(model.get_submodule(name)) is type(stages[stage].get_submodule(own_name))
                if same_type and own_name not in matched[stage] and name not in matched[stage].values():
                    matched[stage][own_name] = name
    return matched


def _ancestors(name: str, own: str) -> Iterator[tuple[str, str]]:
    """Pairs of modules around a tensor whose last names agree: `layers.3.attn.q.weight` and `0.attn.q.weight`."""
    steps, own_steps = name.split("."), own.split(".")
    for depth in range(1, min(len(steps), len(own_steps))):
        if steps[-depth] != own_steps[-depth]:
            return
        yield ".".join(steps[:-depth]), ".".join(own_steps[:-depth])
