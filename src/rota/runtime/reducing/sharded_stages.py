"""Stages that are sharded by FSDP2 (`fully_shard`), and the refusal of DDP.

A pipeline runs many forwards before the first backward, and reduces once per step: it sets when FSDP reduces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rota.core.errors import PipelineError
from rota.core.placement import Placement
from rota.models import Stages
from rota.runtime.device.protocol import Device, Mark
from rota.runtime.transport import collective
from rota.torch_internals import reduce_sharded_gradients, unreduced_parameters


def refuse_wrapped(stages: Stages) -> None:
    """Raises PipelineError for a stage with DDP in it, and for a weight of several stages that FSDP has separated."""
    for stage, module in enumerate(stages.modules):
        if any(isinstance(inner, DistributedDataParallel) for inner in module.modules()):
            raise PipelineError(
                f"stage {stage} has DDP in it, which would reduce after the first of several backwards; leave DDP out: "
                f"the pipeline averages the gradients of replicas itself, with Pipeline(…, mesh=rota.mesh(…))"
            )
    for tie in stages.first_ties:  # `fully_shard` makes other parameters, so that one weight of two stages becomes two
        weights = [dict(stages[stage].named_parameters()).get(name) for stage, name in tie]
        if len({*map(id, weights)}) > 1 and any(weight is not None and is_sharded(weight) for weight in weights):
            where = " and ".join(f"{name} of stage {stage}" for stage, name in tie)
            raise PipelineError(
                f"{where} were one weight, of which fully_shard has made several that would train separately; do not "
                f"shard a stage that shares a weight with another one, or untie it before rota.split"
            )


@final
class Sharded:
    """The stages of this rank that `fully_shard` was applied to, whole or in layers. Raises PipelineError.

    FSDP gathers whole weights in its own hooks: in forwards, and in B or I when a backward reaches a module's output. W
    runs no hooks, so its weights are gathered before it. No hook reduces gradients.
    """

    def __init__(self, stages: Stages, placement: Placement, local: tuple[int, ...], replicas: list[int]) -> None:
        self._roots = {stage: roots for stage in local if (roots := _roots(stages[stage]))}
        #: (start, end) of each stage's reduction in the last step.
        self.reductions: dict[int, tuple[Mark, Mark]] = {}
        for stage in local:
            for name, parameter in stages[stage].named_parameters():
                if is_sharded(parameter):
                    _refuse_mesh(stage, name, parameter, replicas)
            if stage in self._roots and len(placement.ranks_of(stage)) > 1:
                raise PipelineError(f"stage {stage} is on several ranks and sharded by fully_shard; do one of the two")

    def __iter__(self) -> Iterator[int]:
        return iter(self._roots)

    def begin(self) -> None:
        """Keep all backwards of a step from reducing."""
        self.reductions = {}
        for roots in self._roots.values():
            for root in roots:
                _set_last(root, False)

    def gather(self, stage: int) -> None:
        """Gather whole weights for W: a forward since I may have released them."""
        for inner in self._sharded(stage):
            inner.unshard()

    def reduce(self, stage: int, device: Device) -> None:
        """Reduce after the last weight gradient, as `torch.distributed.pipelining` does. Collective over replicas."""
        start = device.mark()
        with collective("reducing gradients of sharded stages over replicas"):
            for root in self._roots[stage]:
                _set_last(root, True)
                reduce_sharded_gradients(root)
        self.reductions[stage] = start, device.mark()

    def finish(self) -> None:
        """Release whole weights, also after forwards without backward: an optimizer changes only the shards."""
        for stage in self._roots:
            for inner in self._sharded(stage):
                inner.reshard()

    def _sharded(self, stage: int) -> Iterator[Any]:
        for root in self._roots[stage]:
            yield from (module for module in root.modules() if _is_fsdp(module))


def _set_last(root: Any, last: bool) -> None:
    root.set_is_last_backward(last)
    root.set_reshard_after_backward(last)
    root.set_requires_gradient_sync(last)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor. Does not import DTensor's module, which costs a second."""
    return hasattr(tensor, "to_local")


def unreduced(stages: Iterable[nn.Module]) -> set[nn.Parameter]:
    """The parameters whose gradients of steps with `sync=False` FSDP keeps for itself until a step with `sync=True`."""
    modules = (module for stage in stages for module in stage.modules() if _is_fsdp(module))
    return {parameter for module in modules for parameter in unreduced_parameters(module)}


def _is_fsdp(module: nn.Module) -> bool:
    """Whether it is an FSDPModule. Does not import the module of that class."""
    return hasattr(type(module), "set_requires_gradient_sync")  # of a module itself, this takes 20 times as long


def _roots(module: nn.Module) -> list[Any]:
    """The outermost sharded layers of the module."""
    if _is_fsdp(module):
        return [module]
    return [root for child in module.children() for root in _roots(child)]


def _refuse_mesh(stage: int, name: str, parameter: Any, replicas: list[int]) -> None:
    over = sorted(parameter.device_mesh.mesh.flatten().tolist())
    if over != replicas or parameter.device_mesh.ndim > 1:
        raise PipelineError(
            f"{name} of stage {stage} is a DTensor over a mesh of the processes {over}, but needs a 1-D mesh of this "
            f"stage's replicas, {replicas}; use fully_shard(stage, mesh=mesh['dp']), and rota.spmd for tensor "
            f"parallelism"
        )
