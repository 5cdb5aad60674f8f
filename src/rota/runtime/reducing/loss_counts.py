"""Gradients of losses with a count: divided at the end of a round, when the counts of all its micro-batches are known.

    step(sync=False)   backwards of sums × per_count ─┐
    step()             backwards of sums × per_count ─┴─▶ .grad × 1 / (per_count · mean count of the round's steps)

A round ends with a step that has `sync`. `per_count` is a power of two near 1 / count, so that gradients in low
precision have the magnitude that they will have. What `.grad` held before the round is kept apart, since it must not be
divided.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import nn

from rota.core.errors import PipelineError
from rota.runtime.device.protocol import Number
from rota.runtime.microbatches import num_elements
from rota.runtime.reducing.norms import local
from rota.runtime.reducing.sharded_stages import is_sharded
from rota.runtime.step_losses import AT_ONCE
from rota.torch_internals import multiply_each, version_of

_KEPT, _CLEARED, _STEPPED, _ELEMENTS = range(4)
NUM_FLAGS = 4


@final
class LossCounts:
    """Loss counts of one rank's parameters. Ranks call the same methods, and share all state except gradients."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [*parameters]
        #: Whether `loss_fn` returns means; None before the first step.
        self.are_means: bool | None = None
        self._before: dict[nn.Parameter, torch.Tensor] = {}  # what `.grad` held before the round
        self._num_steps = 0  # of the round
        self._count: Number = 0.0  # of the round
        self._per_count = 1.0
        self._is_running = False
        #: After a step without sync: each parameter's gradient, and how often it was written to.
        self._left: list[tuple[torch.Tensor | None, int]] | None = None

    @property
    def is_open(self) -> bool:
        """Whether gradients still have to be divided."""
        return self._left is not None

    def flags(self, targets: Iterable[Any], have_weights_changed: bool = False) -> list[int]:
        """This rank's flags before a step; their maxima over all ranks go to `begin`.

        `targets`: those read here. `have_weights_changed`: since the last step.
        """
        if self.are_means and self._left is None:
            return [0] * NUM_FLAGS
        flags = [0, 0, 0, sum(map(num_elements, targets))]
        if self._left is not None:
            are_left = [
                is_sharded(parameter) or _is_left(parameter.grad, gradient, version)
                for parameter, (gradient, version) in zip(self.parameters, self._left, strict=True)
            ]
            flags[_KEPT] = any(are_left)
            pairs = zip(self._left, are_left, strict=True)
            flags[_CLEARED] = any(gradient is not None and not is_left for (gradient, _), is_left in pairs)
            flags[_STEPPED] = have_weights_changed
        return flags

    def begin(self, flags: Sequence[int]) -> float:
        """Before a step's backwards; returns what they multiply sums by.

        Raises PipelineError, on all ranks, if only a part of the round's gradients is left, or weights have changed.
        """
        if self._left is not None:
            self._refuse_changes(flags)
            if flags[_CLEARED]:
                self._before.clear()
                self._end()
        self._is_running = True
        if not self._num_steps and not self.are_means:
            self._per_count = 2.0 ** -round(math.log2(max(flags[_ELEMENTS], 1)))
            for parameter in self.parameters:
                if parameter.grad is not None:
                    self._before[parameter], parameter.grad = parameter.grad, None
        self._left = None
        return self._per_count

    def _refuse_changes(self, flags: Sequence[int]) -> None:
        if flags[_KEPT] and flags[_CLEARED]:
            self._end()
            raise PipelineError(
                "after a step with sync=False only some gradients were cleared, but the loss's count covers all; clear "
                "all of them, or none"
            )
        if flags[_STEPPED] and not flags[_CLEARED]:
            self._end()
            raise PipelineError(
                "weights have changed after a step with sync=False, whose gradients are not divided by the loss's "
                "count yet; let the optimizer step after a step with sync=True"
            )

    def finish(self, count: Number | None, sync: bool, remedy: str = AT_ONCE) -> None:
        """After a step's reductions: divide if the round ends, with `sync`. Does not wait for the device.

        `count`: the step's, a mean over replicas; None if `loss_fn` returns means. Raises PipelineError as
        `refuse_change`, on all ranks; `remedy`: the end of its message.
        """
        if self.are_means is not None:
            refuse_change(self.are_means, count is None, remedy)
        self.are_means, self._is_running = count is None, False
        self._num_steps += 1
        if count is not None:
            self._count = self._count + count
        if sync:
            if count is not None:
                factor = self._num_steps / (self._count * self._per_count)
                with torch.no_grad():
                    multiply_each([local(p.grad) for p in self.parameters if p.grad is not None], factor)
            self._end()
        elif count is not None or self._before:
            gradients = (parameter.grad for parameter in self.parameters)
            self._left = [(gradient, 0 if gradient is None else version_of(gradient)) for gradient in gradients]

    def abort(self) -> None:
        """After a step that failed: if its loss may have a count, `.grad` is restored to its value before the round."""
        if self._is_running and not self.are_means:
            for parameter in self.parameters:
                parameter.grad = None
            self._end()
        self._is_running = False

    def _end(self) -> None:
        """Restore the earlier gradients and add the current ones."""
        if self._before:
            with torch.no_grad():
                for parameter, before in self._before.items():
                    if parameter.grad is not None:
                        local(before).add_(local(parameter.grad))
                    parameter.grad = before
        self._before, self._num_steps, self._count, self._left = {}, 0, 0.0, None


def refuse_change(were_means: bool, are_means: bool, remedy: str) -> None:
    """Raises PipelineError if `loss_fn` returned means in earlier steps and does not now, or vice versa."""
    if were_means != are_means:
        now, before = ("a mean", "(sum, count)") if are_means else ("(sum, count)", "a mean")
        raise PipelineError(
            f"loss_fn returns {now}, after {before} in earlier steps; return the same in all steps, or make a new "
            f"Pipeline. {remedy}"
        )


def _is_left(gradient: torch.Tensor | None, before: torch.Tensor | None, version: int) -> bool:
    """Whether a gradient is still there, unchanged or rescaled by the caller, and not zeroed."""
    if gradient is None or before is None:
        return False
    return (gradient is before and version_of(gradient) == version) or bool(local(gradient).any())
