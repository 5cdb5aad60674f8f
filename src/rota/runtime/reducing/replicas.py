"""Replicas of a pipeline: equal from the start, their gradients averaged once per step, while other ops still run.

rank 2, replica 0   … 2B2  2B3 ─┐ averaging stage 2's gradients ┌ 1B3 …
rank 2, replica 1   … 2B2  2B3 ─┴───────────────────────────────┴ 1B3 …     wait for it at the step's end
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from rota.core.errors import PipelineError
from rota.core.programs.device_steps import COMPUTE
from rota.models import Stages
from rota.runtime.device.protocol import Mark, QueuedDevice
from rota.runtime.json_messages import all_gather_json
from rota.runtime.reducing.sharded_stages import is_sharded
from rota.runtime.spmd import replicated_names
from rota.runtime.transport import collective


def parameters_by_stage(stages: Stages, last: Iterable[int]) -> dict[int, list[nn.Parameter]]:
    """The parameters that are not sharded, each once, by the last stage (in the order of `last`) that uses them."""
    by_stage: dict[int, list[nn.Parameter]] = {}
    seen: set[nn.Parameter] = set()
    for stage in reversed([*last]):
        own = [p for p in stages[stage].parameters() if p not in seen and not is_sharded(p)]
        seen.update(own)
        by_stage[stage] = own
    return by_stage


def make_equal(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Give all processes of the group the values that its first one has."""
    for same in by_dtype(tensors).values():
        flat = torch.cat([tensor.detach().reshape(-1).cpu() for tensor in same])
        with collective("making the replicas' weights equal"), torch.no_grad():
            dist.broadcast(flat.view(torch.uint8), group_src=0, group=group)
            for tensor, value in _slices(flat, same):
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
    """Averages the gradients of some parameters over replicas, and puts the averages into `.grad`.

    There is one flat buffer per dtype, as `packed` makes it. A gradient that no replica has stays None. On the CPU,
    `start` and `finish` do it; on a queued device, `enqueue` does.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._parameters, self._group = parameters, group
        self._under_way: list[tuple[Any, torch.Tensor, list[nn.Parameter]]] = []
        self._started_ns, self._ended_ns = 0, [0]

    def start(self) -> None:
        """Start the all-reduces without waiting for the others. Collective, as is `finish`."""
        self._started_ns, self._ended_ns = time.monotonic_ns(), []
        for parameters, flat in self._packed():
            with collective("averaging gradients over replicas"):
                work: Any = dist.all_reduce(flat, group=self._group, async_op=True)
            ended = self._ended_ns  # this step's list, in case the callback comes late
            work.get_future().add_done_callback(lambda _, ended=ended: ended.append(time.monotonic_ns()))
            self._under_way.append((work, flat, parameters))

    def finish(self) -> tuple[int, int]:
        """Wait for the averages; returns when they began and when they were complete, in ns of the monotonic clock."""
        num_begun = len(self._under_way)
        for work, flat, parameters in self._under_way:
            with collective("averaging gradients over replicas"):
                work.wait()
            unpack(flat, parameters)
        self._under_way.clear()
        ended = max(self._ended_ns, default=self._started_ns)
        return self._started_ns, ended if len(self._ended_ns) == num_begun else time.monotonic_ns()

    def enqueue(self, stream: Any, absent: AbsentGradients) -> tuple[Mark, Mark]:
        """Enqueue all of it on `stream`; returns the marks before and behind it. Collective."""
        with absent.device.use(stream):
            begun = absent.device.mark()
            for parameters, flat in self._packed():
                with collective("averaging gradients over replicas"):
                    dist.all_reduce(flat, group=self._group)
                absent.unpack(flat, parameters)
            return begun, absent.device.mark()

    def _packed(self) -> Iterator[tuple[list[nn.Parameter], torch.Tensor]]:
        for parameters in by_dtype(p for p in self._parameters if p.requires_grad).values():
            yield parameters, packed(parameters).div_(self._group.size())


@final
class AbsentGradients:
    """Gradients that this rank does not have after a step, while another process may: `finish` makes these.

    Whether another process has one is known on the device alone, so the host waits for it, but only where one is
    absent. Everything else is enqueued.
    """

    def __init__(self, device: QueuedDevice) -> None:
        self.device = device
        self._read: list[tuple[Callable[[], list[float]], torch.Tensor, list[nn.Parameter]]] = []

    def unpack(self, flat: torch.Tensor, parameters: list[nn.Parameter]) -> None:
        """On the current stream, copy `packed` gradients back into each `.grad` that is there."""
        for parameter, own in _slices(flat, parameters):
            if parameter.grad is not None:
                parameter.grad.copy_(own)
        if any(parameter.grad is None for parameter in parameters):
            self._read.append((self.device.read(flat[-len(parameters) :].abs()), flat, parameters))

    @torch.no_grad()
    def finish(self) -> None:
        """On the compute stream, which has waited for the sums."""
        for read, flat, parameters in self._read:
            for (parameter, own), anywhere in zip(_slices(flat, parameters), read(), strict=True):
                if parameter.grad is None and anywhere:
                    parameter.grad = torch.empty_like(parameter).copy_(own)
            self.device.keep_for(flat, self.device.stream(COMPUTE))
        self._read.clear()


def by_dtype(tensors: Iterable[torch.Tensor]) -> dict[torch.dtype, list[Any]]:
    """The tensors by dtype, each list in the given order."""
    groups: dict[torch.dtype, list[Any]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return groups


def packed(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Gradients of parameters of one dtype, flat, then one flag per parameter: 1 if it has a gradient, else 0.

    Shape [number of elements of all parameters + number of parameters], dtype that of the parameters.
    """
    num = sum(parameter.numel() for parameter in parameters)
    flat = torch.zeros(num + len(parameters), dtype=parameters[0].dtype, device=parameters[0].device)
    for i, (parameter, own) in enumerate(_slices(flat, parameters)):
        if parameter.grad is not None:
            if parameter.grad.is_sparse:
                raise PipelineError(
                    f"a parameter of shape {list(parameter.shape)} has a sparse gradient, which is not reduced "
                    f"over processes; make it with sparse=False"
                )
            own.copy_(parameter.grad)
            flat[num + i].fill_(1)
    return flat


@torch.no_grad()
def unpack(flat: torch.Tensor, parameters: list[nn.Parameter]) -> None:
    """Copy the gradients of `packed` back into `.grad`, for each parameter whose gradient any process had."""
    flags = flat[-len(parameters) :].abs().tolist()
    for (parameter, own), anywhere in zip(_slices(flat, parameters), flags, strict=True):
        if parameter.grad is not None:
            parameter.grad.copy_(own)
        elif anywhere:
            parameter.grad = torch.empty_like(parameter).copy_(own)


def _slices(flat: torch.Tensor, tensors: list[Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Each tensor with its slice of the flat buffer."""
    start = 0
    for tensor in tensors:
        yield tensor, flat[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()
