"""Mixed precision as PyTorch has it: ambient autocast for forwards only, one overflow decision for all ranks' scalers.

rank 0   F0 F1 … B1   gradients finite ─┐                    ┌─▶ inf into all gradients ─▶ scaler.step: skips
rank 1   F0 B0 F1 …   an inf in one    ─┴─ one all-reduce ───┴─▶ inf into all gradients ─▶ scaler.step: skips

On a queued device the scale and the overflow stay there; whether all ranks have the same scale is read afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from typing import Any, TypeAlias, final
from weakref import WeakSet

import torch
from torch import nn

from rota.core.errors import PipelineError
from rota.runtime.device.numbers import bits_of, number_of
from rota.runtime.device.protocol import Device, Number
from rota.torch_internals import norms_of_each, sparse_values

Autocast: TypeAlias = tuple[tuple[str, torch.dtype], ...]
#: Raises PipelineError, which ends with the remedy that it is given.
Refuse: TypeAlias = Callable[[str], None]

_NOTHING = nullcontext()
_NOT_READ = 1  # instead of the bits of a scale that is on the device


def ambient_autocast() -> Autocast:
    """What autocast is on around the caller: device type and dtype of each, none if it is off."""
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in _device_types() if torch.is_autocast_enabled(kind))


@cache
def _device_types() -> list[str]:
    types, accelerator = ["cpu"], torch.accelerator.current_accelerator()
    if accelerator is not None and torch.amp.is_autocast_available(accelerator.type):
        types.append(accelerator.type)
    return types


def without_autocast(autocast: Autocast) -> AbstractContextManager[object]:
    """For a backward: it computes in the dtypes of its forward, so nothing may be cast again."""
    if not autocast:
        return _NOTHING
    stack = ExitStack()
    for device_type, dtype in autocast:
        stack.enter_context(torch.autocast(device_type, dtype, enabled=False))
    return stack


@final
class LossScale:
    """What a `GradScaler` asks of a pipeline's steps. Every rank has one, with or without a scaler."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._scaler: torch.amp.GradScaler | None = None
        self._factor: Number = 1.0
        self._one = torch.ones((), device=device.torch_device)
        self._witness: torch.optim.Optimizer | None = None  # made for the first scaler
        self._given: WeakSet[torch.amp.GradScaler] = WeakSet()
        self._to_restore: dict[str, Any] | None = None  # see `restore`

    @property
    def is_on(self) -> bool:
        """Whether the last step had a scaler, which looks for what is not finite itself."""
        return self._scaler is not None

    def begin(self, scaler: torch.amp.GradScaler | None) -> Number:
        """A new step; returns what its loss's gradient is multiplied by. Raises PipelineError for another object."""
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise PipelineError(f"scaler is {scaler!r}; give a torch.amp.GradScaler, or None")
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        if self._scaler is not None:
            self._given.add(self._scaler)
            if self._to_restore is not None:
                try:
                    self._scaler.load_state_dict(self._to_restore)
                except (KeyError, RuntimeError, TypeError) as error:
                    raise PipelineError(f"the checkpoint has no state of a gradient scaler: {error!r}") from error
                self._to_restore = None
        # Its own `scale` makes a new scaler ready for its `step` and `update`, too.
        self._factor = 1.0 if self._scaler is None else self._device.number(self._scaler.scale(self._one))
        return self._factor

    def state(self) -> dict[str, Any] | None:
        """The state of the scaler that steps were given, None without one. Raises PipelineError if there were two."""
        if len(self._given) > 1:
            raise PipelineError(
                f"pipeline.step was given {len(self._given)} gradient scalers, but checkpoints.steps keeps only one; "
                f"write a loop of your own, with commit(step, scalers=…)"
            )
        return next((scaler.state_dict() for scaler in self._given), self._to_restore)

    def restore(self, state: dict[str, Any]) -> None:
        """Give a `state` to the next scaler, as soon as a step is given one."""
        self._to_restore = state

    def flags(self) -> tuple[int, int]:
        """Two numbers; from their maxima over the ranks `refuse_differences` sees whether all ranks have one scale."""
        if self._scaler is None:
            return 0, 0
        bits = bits_of(self._factor) if isinstance(self._factor, float) else _NOT_READ
        return bits, -bits  # positive floats are ordered as their bits are

    def refuse_differences(self, most: int, least: int) -> None:
        """Raises PipelineError, on all ranks."""
        if most != -least:
            low, high = map(number_of, (-least, most))
            scales = f"scales {low:g} and {high:g}" if low else f"scale {high:g}, and none on some rank"
            raise _differ("one on some ranks, none on others" if most == _NOT_READ else scales)

    def settle(self, parameters: Iterable[nn.Parameter], agree: Callable[[torch.Tensor], None]) -> Refuse:
        """Let all scalers find an overflow if any rank has one. Collective where there is a scaler.

        `agree` takes the maximum over all ranks. The scaler sees it in this rank's gradients, and in a witness beside
        them, so that its `update` has something to go by where there are none. Does not wait for the device; the result
        does, and raises PipelineError if the ranks have different scales.
        """
        if self._scaler is None:
            return nothing_to_refuse
        gradients = [_numbers(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if self._witness is None:
            where = self._device.torch_device
            self._witness = torch.optim.SGD([nn.Parameter(torch.zeros((), device=where))])
        (witness,) = self._witness.param_groups[0]["params"]
        if isinstance(self._factor, float):
            refuse: Refuse = nothing_to_refuse
            witness.grad = torch.tensor(torch.inf if _overflow(gradients, agree) else 0.0)
        else:
            witness.grad = torch.zeros_like(witness)
            refuse = self._spread_on_device(gradients, self._factor, witness.grad, agree)
        try:
            self._scaler.unscale_(self._witness)
        except RuntimeError as error:
            raise PipelineError(
                "the scaler has not been updated since the last synchronized step; call scaler.update() after it, on "
                "ranks without gradients too, and give step(…, sync=False) to those before the last one of a round"
            ) from error
        return refuse

    def _spread_on_device(
        self,
        gradients: list[torch.Tensor],
        factor: torch.Tensor,
        witness: torch.Tensor,
        agree: Callable[[torch.Tensor], None],
    ) -> Refuse:
        """Make all gradients infinite if one on any rank is not finite; see `settle` for the result."""
        row = torch.stack([factor, -factor, torch.zeros_like(factor)])
        real = [torch.view_as_real(g) if g.is_complex() else g for g in gradients if g.numel()]
        if real:
            largest = torch.stack(norms_of_each(real, torch.inf, torch.float64))
            row[2].add_(largest.isfinite().logical_not().sum())
        agree(row)
        overflows = row[2] > 0
        for gradient in (*gradients, witness):
            gradient.masked_fill_(overflows, torch.inf)
        numbers = self._device.read(row)

        def refuse(remedy: str) -> None:
            high, low, _ = numbers()
            if high != -low:
                raise _differ(f"scales {-low:g} and {high:g}", remedy)

        return refuse


def _overflow(gradients: list[torch.Tensor], agree: Callable[[torch.Tensor], None]) -> bool:
    """Whether a gradient on any rank is not finite; then all become infinite."""
    is_here = any(not gradient.isfinite().all() for gradient in gradients)
    overflow = torch.tensor(int(is_here), device="cpu")
    agree(overflow)
    if overflow:
        for gradient in gradients:
            gradient.fill_(torch.inf)
    return bool(overflow)


def nothing_to_refuse(_: str) -> None:
    """The `Refuse` where all is well."""


def _differ(scales: str, remedy: str = "") -> PipelineError:
    return PipelineError(
        f"the ranks' gradient scalers differ ({scales}); give step one of the same settings on every rank, and "
        f"call its update() on every rank, also where there is no gradient{remedy and f'. {remedy}'}"
    )


def _numbers(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient's memory on this rank; of a sparse one what is not zero."""
    local: torch.Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient  # of FSDP, a DTensor
    return sparse_values(local) if local.is_sparse else local
