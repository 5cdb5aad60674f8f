"""A forward that keeps no activations, and the same forward again when they are needed: by R, or by a backward.

The second one gets the same inputs and random states (PyTorch's are seeded by the caller), and buffers as they were
before the first: it computes the same, and what it does to buffers, such as BatchNorm's statistics, is not done twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from rota.core.errors import PipelineError
from rota.core.placement import Placement
from rota.core.tasks import Kind
from rota.models.randomness import RandomStates
from rota.runtime.messages import tensors_in
from rota.torch_internals import version_of

_WITHOUT = "plan without recomputation, and leave the stage out of Pipeline(recompute=…)"


def recomputed_by_backward(asked: str | Iterable[int], placement: Placement) -> frozenset[int]:
    """The plan's stages that `Pipeline(recompute=asked)` names, for each data stream. Raises PipelineError.

    None where nothing is trained. A stage with R in the plan is refused: it would be recomputed twice.
    """
    num_stages = placement.num_stages // placement.num_components
    if isinstance(asked, str) and asked not in ("none", "full"):
        raise PipelineError(f"recompute={asked!r}; say 'none', 'full' or give a list of stages")
    of_model = {"none": (), "full": range(num_stages)}[asked] if isinstance(asked, str) else [*asked]
    for stage in of_model:
        if stage not in range(num_stages):
            raise PipelineError(f"recompute has stage {stage!r}, but the model has stages 0 to {num_stages - 1}")
    stages = frozenset(s for s in placement.stages if s % num_stages in of_model)
    if twice := sorted(s for s in stages if placement.task(s, Kind.R)):
        raise PipelineError(
            f"recompute={asked!r} names stage {twice[0]}, which the plan recomputes by R already; name the others alone"
        )
    if offloaded := sorted(s for s in stages if placement.task(s, Kind.O)):
        raise PipelineError(
            f"recompute={asked!r} names stage {offloaded[0]}, which the plan offloads; name the others alone"
        )
    return frozenset(s for s in stages if placement.task(s, Kind.B) or placement.task(s, Kind.I))


@dataclass(slots=True)
class Again:
    """What a first forward leaves for the second: what it received, and the buffers that it changed, as before.

    `draws`: the random states from which it drew, except for those that the caller seeds; None if it did not.
    """

    received: list[Any]
    buffers: dict[str, torch.Tensor]
    draws: RandomStates | None = None


@contextmanager
def without_activations(module: nn.Module, received: list[Any], inputs: tuple[Any, ...], where: str) -> Iterator[Again]:
    """Around a first forward; the result is complete after it. `inputs`: what the stage reads of the batch.

    Autograd's graph is made, since it shows which outputs want a gradient, but nothing is saved in it.
    """
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    again = Again(received, {})
    versions, draws = versions_in((received, inputs)), RandomStates(module, seeded=True)
    with saved_tensors_hooks(lambda _: None, _refuse):
        yield again
    if versions != versions_in((received, inputs)):
        raise PipelineError(
            f"{where} writes into what it receives, which its recomputation needs unchanged; let it begin with an "
            f"operation that is not in place, or {_WITHOUT}"
        )
    again.draws = draws if draws.changed() else None
    after = dict(module.named_buffers())
    again.buffers = {name: old for name, old in before.items() if not _is_known_equal(old, after[name])}


def _is_known_equal(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether two tensors are equal, as far as the host knows without waiting for an accelerator.

    A buffer's version does not tell: batch_norm writes running statistics without counting it, and so does `.data`.
    So on an accelerator each buffer counts as changed. Its copy, which is there already, is kept until it is needed.
    """
    return old.device.type == "cpu" and torch.equal(old, new)


@contextmanager
def drawing_again(module: nn.Module, again: Again) -> Iterator[None]:
    """Around the second forward: it draws what the first one drew."""
    if again.draws is None:
        yield
        return
    now = RandomStates(module, seeded=True)
    again.draws.restore()
    try:
        yield
    finally:
        now.restore()


def versions_in(value: Any) -> list[int]:
    """How often each tensor in a value has been written to."""
    return [*map(version_of, tensors_in(value))]


def _refuse(_: None) -> torch.Tensor:
    raise PipelineError(f"a stage that is recomputed differentiates inside its forward; {_WITHOUT}")
