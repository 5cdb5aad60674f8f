"""The unsplit model, run on the whole batch or on one micro-batch after the other."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import nn

from rota.errors import PipelineError
from rota.models.added_losses import collect_losses
from rota.models.randomness import RandomStates, random_state_kept
from rota.runtime.losses import LossFn, loss_of
from rota.runtime.messages import over_tensors, tensors_in
from rota.runtime.microbatches import shares_of, to_microbatches
from rota.verifying.apart import in_dtype

Part: TypeAlias = tuple[Any, Any, float]  # inputs, targets, and the share of the mean loss


class Outcome(NamedTuple):
    """The mean loss, the tensors of each part's output, and the losses of the parts; gradients are in `.grad`."""

    loss: float
    outputs: list[list[torch.Tensor]]
    losses: list[float]


class GivenBatch(NamedTuple):
    """What one replica steps on."""

    inputs: Any
    targets: Any

    def in_dtype(self, dtype: torch.dtype | None) -> GivenBatch:
        """The same with floating-point numbers in `dtype`, unless it is None."""
        return GivenBatch(*(over_tensors(lambda tensor: in_dtype(tensor, dtype), plain(each)) for each in self))


@final
class Unsplit:
    """A copy of `model` in `dtype`, on the CPU; None: in its own."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, loss_fn: LossFn) -> None:
        named = [*model.named_parameters(), *model.named_buffers()]
        memo = {id(tensor): _fresh(tensor, dtype) for _, tensor in named}  # one for each: ties stay
        self.module: nn.Module = copy.deepcopy(model, memo)
        self._empty = {name for name, tensor in named if tensor.is_meta}
        self._loss_fn = loss_fn

    def fill(self, name: str, value: torch.Tensor) -> None:
        """Set a parameter or buffer, all of whose names follow."""
        owner, _, last = name.rpartition(".")
        with torch.no_grad():
            getattr(self.module.get_submodule(owner), last).copy_(value)
        self._empty.discard(name)

    def refuse_empty(self) -> None:
        """Raises PipelineError if a tensor has no values."""
        if self._empty:
            raise PipelineError(
                f"the unsplit model is on the meta device, and no stage has its {min(self._empty)!r}; give a "
                f"model with values, or a function that makes one"
            )

    def gradient(self, name: str) -> torch.Tensor | None:
        """Of the last run; None without one."""
        return self.module.get_parameter(name).grad

    def draws(self, batch: GivenBatch) -> bool:
        """Whether the forward draws random numbers."""
        with random_state_kept(self.module), torch.no_grad():
            states = RandomStates(self.module)
            call(self.module, batch.inputs)
            return states.changed()

    def run(self, parts: Iterable[Part]) -> Outcome:
        """Forward and backward of each part; gradients add up in `.grad`. Buffers and random states do not change."""
        self.module.zero_grad(set_to_none=True)
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        losses, outputs, total, count = [], [], 0.0, 0.0
        with random_state_kept(self.module):
            for inputs, targets, share in parts:
                with collect_losses() as added:
                    output = call(self.module, inputs)
                root, loss = loss_of(self._loss_fn, output, targets)
                root = root * share if loss.count is None else root
                for each in added.losses:
                    root = root + each.value * (share if each.count is None else each.count)
                if root.requires_grad:
                    with collect_losses():  # a checkpointed block runs again
                        torch.autograd.backward(root)
                losses.append(loss.mean)
                total, count = total + root.item(), count + (loss.count or 0.0)
                outputs.append([tensor.detach() for tensor in tensors_in(output)])
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
            for parameter in self.module.parameters() if count else ():
                if parameter.grad is not None:
                    parameter.grad /= count
        return Outcome(total / (count or 1.0), outputs, losses)

    def loss(self, output: Any, targets: Any) -> float:
        """What `loss_fn` makes of an output."""
        with torch.no_grad():
            return float(self._loss_fn(output, targets))


def _fresh(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A copy on the CPU, without values where there are none."""
    data = torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor.detach().to("cpu", copy=True)
    data = in_dtype(data, dtype)
    return nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


def whole(batches: Sequence[GivenBatch]) -> list[Part]:
    """The batch of each replica as a part."""
    return [(*batch, 1 / len(batches)) for batch in map(_joined, batches)]


def by_microbatches(batches: Sequence[GivenBatch], num_microbatches: int) -> list[Part]:
    """Each micro-batch of each replica as a part."""
    parts: list[Part] = []
    for batch in batches:
        split = [to_microbatches(*pair, num_microbatches) for pair in zip(("inputs", "targets"), batch, strict=True)]
        sizes = next((each.sizes for each in reversed(split) if each.sizes), ())
        shares = shares_of(sizes, num_microbatches)
        parts += [
            (*part, share / len(batches))
            for *part, share in zip(*(each.values for each in split), shares, strict=True)
            if share
        ]
    return parts


def _joined(batch: GivenBatch) -> GivenBatch:
    """Lists of micro-batches as one batch."""
    return GivenBatch(*(_cat(each) if isinstance(each, list) else each for each in batch))


def _cat(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, torch.Tensor):
        if len({part.shape[1:] for part in parts}) > 1:
            shapes = ", ".join(str([*part.shape]) for part in parts)
            raise PipelineError(
                f"micro-batches of shapes {shapes} make no batch for the unsplit model; pad them to one length, or "
                f"compare with against='microbatches'"
            )
        return torch.cat(parts) if first.dim() else first
    if isinstance(first, dict):
        return {key: _cat([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple):
        return tuple(_cat([*items]) for items in zip(*parts, strict=True))
    return first


def call(module: nn.Module, inputs: Any) -> Any:
    """The module's output: a dict goes in as keyword arguments, a tuple as positional ones."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)


def plain(batch: Any) -> Any:
    """A tokenizer's batch and other mappings as a dict."""
    return dict(batch) if isinstance(batch, Mapping) else batch
