"""The unsplit model, run on the whole batch or on one micro-batch after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import nn

from rota.core.errors import PipelineError
from rota.models import collect_losses
from rota.models.carving.copies import deep_copy
from rota.models.randomness import RandomStates, random_state_kept
from rota.runtime.device.numbers import number_in
from rota.runtime.device.protocol import HostDevice
from rota.runtime.losses import LossFn, MicrobatchLoss, Weighed, loss_of
from rota.runtime.messages import over_tensors, tensors_in
from rota.runtime.microbatches import num_examples, shares_of, to_microbatches, with_dicts
from rota.runtime.step_losses import loss_of_parts
from rota.verifying.apart import in_dtype

_READ_AT_ONCE = HostDevice()


class Part(NamedTuple):
    """What the model runs on at once, and its share of a mean loss."""

    inputs: Any
    targets: Any
    share: float


class Outcome(NamedTuple):
    """The loss, and each part's output tensors and losses; gradients are in `.grad`.

    `loss_without_added`: without what modules add by `rota.add_loss`.
    """

    loss: float
    loss_without_added: float
    outputs: list[list[torch.Tensor]]
    losses: list[MicrobatchLoss]


class Batch(NamedTuple):
    """The batch of one replica."""

    inputs: Any
    targets: Any

    def in_dtype(self, dtype: torch.dtype | None) -> Batch:
        """The same batch with floating-point numbers in `dtype`, unless it is None."""
        return self._changed(lambda tensor: in_dtype(tensor, dtype))

    def on(self, device: torch.device) -> Batch:
        """The same batch on `device`."""
        return self._changed(lambda tensor: tensor.to(device))

    def _changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        return Batch(*(over_tensors(change, part) for part in self))


_CPU = torch.device("cpu")


@final
class Unsplit:
    """A copy of `model` on `device`, in `dtype`, or in its own dtype if that is None."""

    def __init__(
        self, model: nn.Module, dtype: torch.dtype | None, loss_fn: LossFn, device: torch.device = _CPU
    ) -> None:
        named = [*model.named_parameters(), *model.named_buffers()]
        memo = {id(tensor): _fresh(tensor, dtype, device) for _, tensor in named}  # one per tensor, so ties stay
        self.module: nn.Module = deep_copy(model, memo)
        self._empty = {name for name, tensor in named if tensor.is_meta}
        self._loss_fn = loss_fn

    def fill(self, name: str, value: torch.Tensor) -> None:
        """Set a parameter or buffer, under all of its names."""
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
        """A parameter's gradient of the last run, or None."""
        return self.module.get_parameter(name).grad

    def draws(self, inputs: Any) -> bool:
        """Whether the forward draws random numbers."""
        with random_state_kept(self.module), torch.no_grad():
            states = RandomStates(self.module)
            call(self.module, inputs)
            return states.changed()

    def run(self, parts: Sequence[Part]) -> Outcome:
        """Forward and backward of each part; gradients add up in `.grad`. Buffers and random states do not change."""
        self.module.zero_grad(set_to_none=True)
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        run = _Losses()
        with random_state_kept(self.module):
            outputs = [self._run(part, run) for part in parts]
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        shares = [part.share for part in parts]
        losses = dict(enumerate(run.losses))
        total = loss_of_parts(losses, {(0, i): added for i, added in enumerate(run.added)}, shares)
        if total.count is not None:
            with torch.no_grad():
                for parameter in self.module.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(1 / (total.count * run.per_count))
        return Outcome(total.mean, loss_of_parts(losses, {}, shares).mean, outputs, run.losses)

    def _run(self, part: Part, run: _Losses) -> list[torch.Tensor]:
        with collect_losses() as added:  # around the backward too: checkpointed blocks add theirs again in it
            output = call(self.module, part.inputs)
            returned, loss = loss_of(self._loss_fn, output, part.targets, _READ_AT_ONCE)
            if loss.count is not None and not run.losses:
                run.per_count = 2.0 ** -round(math.log2(max(loss.count, 1)))
            root = returned.reshape(()) * (part.share if loss.count is None else run.per_count)
            for more in added.losses:
                weight = part.share if more.count is None else more.count * run.per_count
                root = root + more.value.reshape(()) * weight
            run.losses.append(loss)
            run.added.append([Weighed(number_in(more.value, _READ_AT_ONCE), more.count) for more in added.losses])
            if root.requires_grad:
                torch.autograd.backward(root)
        return [tensor.detach() for tensor in tensors_in(output)]


@final
class _Losses:
    """The losses of a run's parts. Backwards start from sums × `per_count`, so that low precision does not overflow."""

    def __init__(self) -> None:
        self.losses: list[MicrobatchLoss] = []
        self.added: list[list[Weighed]] = []
        self.per_count = 1.0


def _fresh(tensor: torch.Tensor, dtype: torch.dtype | None, device: torch.device) -> torch.Tensor:
    """A copy on `device`; without values if the tensor has none."""
    data = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device, copy=True)
    data = in_dtype(data, dtype)
    return nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


def whole(batches: Sequence[Batch]) -> list[Part]:
    """The whole batch of each replica as a part, with its share of all rows."""
    shares = shares_of([num_examples(batch.targets) or num_examples(batch.inputs) for batch in batches], len(batches))
    return [Part(*batch, share) for batch, share in zip(batches, shares, strict=True)]


def by_microbatches(batches: Sequence[Batch], num_microbatches: int) -> list[Part]:
    """Each micro-batch of each replica as a part; all replicas weigh the same."""
    return [part for batch in batches for part in _parts(batch, num_microbatches, len(batches))]


def _parts(batch: Batch, num_microbatches: int, num_replicas: int) -> list[Part]:
    inputs = to_microbatches("inputs", batch.inputs, num_microbatches)
    targets = to_microbatches("targets", batch.targets, num_microbatches)
    shares = shares_of(targets.sizes or inputs.sizes, num_microbatches)
    parts = [
        Part(part_inputs, part_targets, share / num_replicas)
        for part_inputs, part_targets, share in zip(inputs.values, targets.values, shares, strict=True)
    ]
    return parts[: num_microbatches - len(targets.padding or inputs.padding)]


def call(module: nn.Module, inputs: Any) -> Any:
    """The module's output: a dict is passed as keyword arguments, a tuple as positional ones."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)


def plain(batch: Any) -> Any:
    """A tokenizer's batch and other mappings as dicts, also in a list of micro-batches."""
    return [*map(with_dicts, batch)] if isinstance(batch, list) else with_dicts(batch)
