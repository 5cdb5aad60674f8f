"""What a checkpoint calls weights and buffers: as the whole model does, whatever the cut.

stage 0: embedding.weight ──┐ tied
stage 3: head.weight      ──┴──▶ "embedding.weight", and "head.weight" is its alias
a stage on 4 ranks, or 4 tensor-parallel ones: w ──▶ "w#0" … "w#3", a shard on each rank
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rota.errors import PipelineError
from rota.models import Stages
from rota.runtime.spmd import replicated_names
from rota.runtime.torch_internals import own_state

if TYPE_CHECKING:
    from rota.runtime.pipeline import Pipeline

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")  # of torch.compile and PyTorch's checkpoint wrapper


class Weight(NamedTuple):
    """A weight or buffer: all its names, the one it is saved by first, and in how many shards it is."""

    names: tuple[str, ...]
    tensor: torch.Tensor
    num_shards: int
    stages: tuple[int, ...]

    @property
    def is_buffer(self) -> bool:
        """Whether it is a buffer, not a parameter."""
        return not isinstance(self.tensor, nn.Parameter)

    def key(self, name: str, shard: int) -> str:
        """What it is saved by, if `name` is its name in the checkpoint and this rank has `shard`."""
        return name if self.num_shards == 1 else f"{name}#{shard}"


def model_key(key: str) -> str:
    """What `torch.distributed.checkpoint` saves a weight or buffer by."""
    return f"model/{key}"


class Weights:
    """Those of the whole model, in its order. Raises PipelineError where a module's state cannot be saved."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.all = [*_weights(pipeline)]

    def local(self) -> Iterator[tuple[Weight, int]]:
        """Those on this rank, and which shard of it is here."""
        here = set(self._pipeline.local_stages)
        for weight in self.all:
            if stages := [stage for stage in weight.stages if stage in here]:
                yield weight, self._part(stages[0])

    def _part(self, stage: int) -> int:
        pipeline, processes = self._pipeline, self._pipeline._processes
        position = sorted(pipeline.plan.placement.ranks_of(stage)).index(pipeline.rank)
        return position * processes.num_shards + processes.shard


def _weights(pipeline: Pipeline) -> Iterator[Weight]:
    stages, placement = pipeline.stages, pipeline.plan.placement
    replicated = {stages[s].get_parameter(name) for s in range(len(stages)) for name in replicated_names(stages[s])}
    of_stages: dict[torch.Tensor, list[int]] = {}
    for stage, module in enumerate(stages.modules):
        for _, tensor in _saved(module):
            of_stages.setdefault(tensor, []).append(stage)
    for tensor, names in names_of(stages).items():
        num_shards = len(placement.ranks_of(of_stages[tensor][0])) * pipeline._processes.num_shards
        whole = tensor in replicated or isinstance(tensor, DTensor)  # DTensors are saved as the wholes that they are
        yield Weight(names, tensor, 1 if whole else num_shards, tuple(of_stages[tensor]))


def names_of(stages: Stages) -> dict[torch.Tensor, tuple[str, ...]]:
    """All names of each weight and buffer; the first is that of `Stages.named_parameters`, but for wrappers."""
    named = [
        (stage, stages.name_in_model(stage, name), tensor)
        for stage, module in enumerate(stages.modules)
        for name, tensor in _saved(module)
    ]
    kinds = [[entry for entry in named if isinstance(entry[2], nn.Parameter) is wanted] for wanted in (True, False)]
    found: dict[torch.Tensor, tuple[str, ...]] = {}
    taken: dict[str, torch.Tensor] = {}
    for kind in kinds:
        clash = len({name for _, name, _ in kind}) < len({(name, tensor) for _, name, tensor in kind})
        for stage, name, tensor in kind:
            full = f"{stage}.{name}" if clash else name
            if taken.setdefault(full, tensor) is not tensor:
                raise PipelineError(f"a buffer and a weight are both named {full!r}; rename one to save checkpoints")
            found[tensor] = tuple(dict.fromkeys((*found.get(tensor, ()), full)))
    return found


def _saved(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What `module.state_dict()` has, under all its names, without the names of wrappers."""
    paths = {"": ""}
    for path, inner in module.named_modules(remove_duplicate=False):
        if type(inner).get_extra_state is not nn.Module.get_extra_state:
            raise PipelineError(
                f"module {path!r}, a {type(inner).__name__}, has an extra state of its own (get_extra_state), which "
                f"checkpoints do not save; keep it in buffers"
            )
        if path:
            parent, _, last = path.rpartition(".")
            paths[path] = paths[parent] if last in _WRAPPED else _join(paths[parent], last)
        yield from ((_join(paths[path], name), tensor) for name, tensor in own_state(inner))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
