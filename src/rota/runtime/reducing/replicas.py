"""Replicas of a pipeline: equal from the start, their gradients averaged once per step, while other ops still run.

rank 2, replica 0   … 2B2  2B3 ─┐ averaging stage 2's gradients ┌ 1B3 …
rank 2, replica 1   … 2B2  2B3 ─┴───────────────────────────────┴ 1B3 …     wait for it at the step's end
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from rota.core.errors import PipelineError
from rota.core.programs.device_steps import COMPUTE
from rota.models import Stages
from rota.runtime.device.protocol import Device, Mark, is_queued
from rota.runtime.json_messages import all_gather_json
from rota.runtime.reducing.sharded_stages import is_sharded
from rota.runtime.spmd import replicated_names
from rota.runtime.transport import collective
from rota.torch_internals import copy_each, zero_each


def parameters_by_stage(
    stages: Stages, last: Iterable[int], without: Iterable[nn.Parameter]
) -> dict[int, list[nn.Parameter]]:
    """The parameters that are not sharded, each once, by the last stage (in the order of `last`) that uses them."""
    by_stage: dict[int, list[nn.Parameter]] = {}
    seen = {*without}
    for stage in reversed([*last]):
        own = [p for p in stages[stage].parameters() if p not in seen and not is_sharded(p)]
        seen.update(own)
        by_stage[stage] = own
    return by_stage


def make_equal(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Give all processes of the group the values that its first one has."""
    for same in _by_dtype(tensors):
        flat = torch.cat([tensor.detach().reshape(-1).cpu() for tensor in same])
        with collective("making the replicas' weights equal"), torch.no_grad():
            dist.broadcast(flat.view(torch.uint8), group_src=0, group=group)
            for tensor, value in zip(same, _slices(flat, same), strict=True):
                tensor.copy_(value)


def replicated_parameters(stages: Stages, local: Iterable[int]) -> list[nn.Parameter]:
    """The parameters that every rank of a tensor-parallel group holds whole, each once."""
    replicated = (stages[stage].get_parameter(name) for stage in local for name in replicated_names(stages[stage]))
    return [*dict.fromkeys(replicated)]


def refuse_other_tensors(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Raises PipelineError, on all replicas, unless all have equal shapes and dtypes, and train the same tensors."""
    tensors_here = [(list(tensor.shape), str(tensor.dtype), tensor.requires_grad) for tensor in tensors]
    with collective("comparing the replicas' parameters"):
        of_replicas = all_gather_json(tensors_here, group)
    for replica, other in enumerate(of_replicas):
        if other != of_replicas[0]:
            place = next((i for i, (a, b) in enumerate(zip(of_replicas[0], other, strict=False)) if a != b), len(other))
            counts = [(len(theirs), sum(trained for *_, trained in theirs)) for theirs in (other, of_replicas[0])]
            raise PipelineError(
                f"on this rank replica {replica} has {counts[0][0]} parameters and buffers and trains {counts[0][1]}, "
                f"replica 0 has {counts[1][0]} and trains {counts[1][1]}; they differ from number {place} on: give all "
                f"replicas the same model, and freeze the same in each"
            )


@final
class GradientAllReduce:
    """Adds up the gradients of some parameters over a group's processes, and puts the sums by `divisor` into `.grad`.

    A gradient that no process has stays None. `sum_dtype`: lower precision is added up in this one; None: in its own.

    Each dtype has a buffer, which is kept from step to step. Gradients are copied there and back, and are no views of
    it: the caller may hold on to those of earlier steps, autograd need not add to zeros, a gradient may be None, and
    sums may have another dtype.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        device: Device,
        divisor: int,
        sum_dtype: torch.dtype | None = None,
    ) -> None:
        self._parameters, self._group, self._device = parameters, group, device
        self._divisor, self._sum_dtype = divisor, sum_dtype
        self._dtypes: list[torch.dtype | None] = []  # of each parameter, None where it is frozen
        self._buffers: list[_Buffer] = []
        self._under_way: list[tuple[Any, _Buffer]] = []
        self._begun: Mark = 0
        self._ended: list[Mark] = [0]

    def start(self, stream: Any = None) -> Mark:
        """Start, without waiting for the others. Collective, as is `finish`.

        On a queued device all of it is put on `stream`, and the mark behind it is returned; else None.
        """
        if is_queued(self._device):
            with self._device.use(stream):
                self._begun = self._device.mark()
                for buffer in self._packed():
                    with collective("adding up gradients"):
                        dist.all_reduce(buffer.flat, group=self._group)
                    buffer.unpack(self._divisor, self._device)
                self._ended = [self._device.mark()]
            return self._ended[0]
        self._begun = time.monotonic_ns()
        self._ended = ended = [self._begun]  # this step's list, in case a callback comes late
        for buffer in self._packed():
            with collective("adding up gradients"):
                work: Any = dist.all_reduce(buffer.flat, group=self._group, async_op=True)
            work.get_future().add_done_callback(lambda _: ended.append(time.monotonic_ns()))
            self._under_way.append((work, buffer))
        return None

    def finish(self) -> tuple[Mark, Mark]:
        """Complete `.grad`; returns when it began, and when the sums were there.

        On a queued device it is called on the compute stream, which has waited for the sums. The host waits only where
        this process has no gradient, as the device alone knows whether another one has.
        """
        for work, buffer in self._under_way:
            with collective("adding up gradients"):
                work.wait()
            buffer.unpack(self._divisor, self._device)
        is_late = len(self._ended) <= len(self._under_way)  # a callback
        self._under_way.clear()
        for buffer in self._buffers:
            buffer.make_absent(self._device)
        return self._begun, time.monotonic_ns() if is_late else max(self._ended)

    def _packed(self) -> Iterator[_Buffer]:
        dtypes = [parameter.dtype if parameter.requires_grad else None for parameter in self._parameters]
        if dtypes != self._dtypes:
            trained = _by_dtype(parameter for parameter in self._parameters if parameter.requires_grad)
            self._dtypes, self._buffers = dtypes, [_Buffer(same, self._sum_dtype) for same in trained]
        for buffer in self._buffers:
            buffer.pack()
            yield buffer


@final
class _Buffer:
    """Gradients of parameters of one dtype, then a flag for each: 0 where no process has one.

    A few operations copy, whatever the number of parameters.
    """

    def __init__(self, parameters: list[nn.Parameter], sum_dtype: torch.dtype | None) -> None:
        self._parameters = parameters
        num, own = len(parameters), parameters[0]
        dtype = own.dtype if sum_dtype is None else torch.promote_types(own.dtype, sum_dtype)
        self.flat = torch.empty(sum(p.numel() for p in parameters) + num, dtype=dtype, device=own.device)
        self._slots, self._flags = _slices(self.flat, parameters), self.flat[-num:]
        self._ones = torch.ones_like(self._flags)
        self._absent: list[int] = []  # parameters that had no gradient when this step's were packed
        self._read: Callable[[], list[float]] | None = None

    @torch.no_grad()
    def pack(self) -> None:
        """Copy the gradients in, and zeros for those that are not there."""
        slots, gradients = self._present()
        if any(gradient.is_sparse for gradient in gradients):
            shape = next([*gradient.shape] for gradient in gradients if gradient.is_sparse)
            raise PipelineError(
                f"a parameter of shape {shape} has a sparse gradient, which is not reduced over processes; make it "
                f"with sparse=False"
            )
        copy_each([*slots, self._flags], [*gradients, self._ones])
        self._absent = [i for i, parameter in enumerate(self._parameters) if parameter.grad is None]
        zero_each([part[i] for i in self._absent for part in (self._slots, self._flags)])

    @torch.no_grad()
    def unpack(self, divisor: int, device: Device) -> None:
        """Divide the sums, and copy them into each `.grad` that is there."""
        if divisor > 1:  # not before the sum: small numbers would be lost in low precision
            self.flat.div_(divisor)
        slots, gradients = self._present()
        copy_each(gradients, slots)
        if self._absent:
            self._read = device.read(self._flags.abs())

    @torch.no_grad()
    def make_absent(self, device: Device) -> None:
        """Make each `.grad` that is not there, but in another process."""
        if self._read is None:
            return
        flags, self._read = self._read(), None
        made = [i for i in self._absent if flags[i]]
        gradients = [torch.empty_like(self._parameters[i]) for i in made]
        copy_each(gradients, [self._slots[i] for i in made])
        for i, gradient in zip(made, gradients, strict=True):
            self._parameters[i].grad = gradient
        if is_queued(device):
            device.keep_for(self.flat, device.stream(COMPUTE))

    def _present(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The slots of all gradients that are there, and these."""
        pairs = zip(self._slots, (parameter.grad for parameter in self._parameters), strict=True)
        present = [(slot, gradient) for slot, gradient in pairs if gradient is not None]
        return [slot for slot, _ in present], [gradient for _, gradient in present]


def _by_dtype(tensors: Iterable[torch.Tensor]) -> list[list[Any]]:
    """The tensors of each dtype, in the given order."""
    groups: dict[torch.dtype, list[Any]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return [*groups.values()]


def _slices(flat: torch.Tensor, tensors: list[Any]) -> list[torch.Tensor]:
    """The part of a flat buffer for each tensor, in its shape."""
    sizes = [tensor.numel() for tensor in tensors]
    parts = flat[: sum(sizes)].split(sizes)
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
