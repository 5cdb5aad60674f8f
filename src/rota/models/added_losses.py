"""Losses that modules add from inside their forward: balance of a mixture of experts, deep supervision.

forward ──add_loss(value)──▶ the innermost collector: a pipeline's op, or the caller's `collect_losses`
"""

from __future__ import annotations

import math
import warnings
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, final

import torch

from rota.core.errors import PipelineError
from rota.torch_internals import is_in_backward


@dataclass(frozen=True, slots=True)
class AddedLoss:
    """A tensor with one element, and how much of the loss's count it stands for; None where the loss is a mean."""

    value: torch.Tensor
    count: float | torch.Tensor | None


@final
class AddedLosses:
    """What modules have added inside of a `collect_losses`, in the order of their calls."""

    def __init__(self) -> None:
        self.losses: list[AddedLoss] = []

    @property
    def total(self) -> Any:
        """The sum of all values, 0.0 if there are none: add it to a mean loss."""
        return sum((loss.value.reshape(()) for loss in self.losses), 0.0)

    @property
    def weighted_total(self) -> Any:
        """The sum of all values times their counts: add it to the sum of a loss with a count, before the division."""
        return sum((loss.value.reshape(()) * _count_of(loss) for loss in self.losses), 0.0)


_COLLECTOR: ContextVar[AddedLosses | None] = ContextVar("rota_added_losses", default=None)


def add_loss(value: torch.Tensor, count: float | torch.Tensor | None = None) -> None:
    """Add an auxiliary loss from inside any module's forward; in a `Pipeline` it counts once per micro-batch.

    Outside of a `Pipeline`, `collect_losses` gets it.

    Args:
        value: a tensor with one element, a mean over the rows of the micro-batch, already times its coefficient.
        count: with a `loss_fn` that returns `(sum, count)`: how much of that count `value` stands for, such as the
            number of tokens in the micro-batch. None with a `loss_fn` that returns a mean.

    Raises:
        PipelineError: `value` is not a real tensor with one element, or `count` is not a finite number of 0 or more. A
            count on an accelerator is only looked at by the pipeline, at the end of the step.
    """
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or value.is_complex():
        got = f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise PipelineError(f"rota.add_loss got {got}; give a real tensor with one element")
    collector = _COLLECTOR.get()
    known = None if count is None else _known(count)
    if is_in_backward():
        return  # a checkpointed block runs its forward again
    if collector is not None:
        collector.losses.append(AddedLoss(value, known))
    elif value.requires_grad:
        warnings.warn(
            "rota.add_loss is called outside of a Pipeline, so its loss is not trained; use "
            "`with rota.collect_losses() as added:` around forward and backward, and add `added.total` to the loss",
            stacklevel=2,
        )


@final
class _Collecting:
    """The context manager of `collect_losses`: a class, since every op enters one and a generator takes longer."""

    __slots__ = ("_added", "_token")

    def __init__(self) -> None:
        self._added = AddedLosses()

    def __enter__(self) -> AddedLosses:
        self._token = _COLLECTOR.set(self._added)
        return self._added

    def __exit__(self, *_: object) -> None:
        _COLLECTOR.reset(self._token)


def collect_losses() -> AbstractContextManager[AddedLosses]:
    """Collect what `add_loss` is called with, so that the unsplit model trains as its stages do.

    Returns:
        A context manager that gives an `AddedLosses`, with `total` and `weighted_total`.
    """
    return _Collecting()


def _known(count: float | torch.Tensor) -> float | torch.Tensor:
    """The count as a number. On an accelerator it stays a tensor: reading it would let the host wait for the device."""
    if isinstance(count, torch.Tensor):
        if count.numel() != 1 or count.is_complex():
            raise PipelineError(
                f"rota.add_loss got as count {count.dtype} of shape {list(count.shape)}; give a number, or a real "
                f"tensor with one element"
            )
        if not (count.is_cpu or count.is_meta):
            return count.detach().reshape(()).to(torch.float64, copy=True)
    number = float(count)
    if not 0 <= number < math.inf:
        raise PipelineError(f"rota.add_loss got count={number:g}; give a finite number of 0 or more")
    return number


def _count_of(loss: AddedLoss) -> float | torch.Tensor:
    if loss.count is None:
        raise PipelineError("a loss was added without a count; give rota.add_loss(value, count=…) one to weigh it")
    return loss.count.to(loss.value.dtype) if isinstance(loss.count, torch.Tensor) else loss.count
