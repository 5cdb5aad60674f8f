"""Weights that several ranks hold: equal from the start, tied ones' gradients summed once per step, each counted once.

rank 0   stage 0  embedding.weight ─┐                          ┌─▶ .grad of this step, the sum on both
rank 3   stage 3  head.weight      ─┴─ one all-reduce per step ┴─▶ on top of what .grad held before
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, final

import torch
import torch.distributed as dist
from torch import nn

from rota.core.errors import PipelineError
from rota.core.placement import Placement
from rota.models import Stages
from rota.models.aliases import refuse_aliases
from rota.runtime.device.protocol import Device, Mark, is_queued
from rota.runtime.meshes import Processes
from rota.runtime.reducing.replicas import GradientAllReduce
from rota.runtime.spmd import replicated_names
from rota.runtime.transport import collective
from rota.torch_internals import version_of


class SharedWeight(NamedTuple):
    """A parameter on several `ranks`; `summed`: each computes a part of its gradient, else each computes all of it."""

    stage: int
    name: str
    ranks: tuple[int, ...]
    summed: bool


def shared_weights(stages: Stages, placement: Placement) -> list[SharedWeight]:
    """All weights that several ranks hold, in the same order on every rank. Raises PipelineError, or SplitError.

    If each of the tied stages is on several ranks, the weight is tied per TP shard, in the order of the ranks.
    """
    refuse_aliases(stages.modules, stages.name_in_model)  # again, as a script may have set weights since
    shared: list[SharedWeight] = []
    tied = set()
    for tie in stages.ties:
        tied |= {*tie}
        on = [sorted(placement.ranks_of(stage)) for stage, _ in tie]
        tp_shards = [tuple(dict.fromkeys(ranks)) for ranks in zip(*on, strict=False)]
        mixed = sum(map(len, tp_shards)) > len({rank for ranks in tp_shards for rank in ranks})
        if len({*map(len, on)}) > 1 or mixed:
            where = ", ".join(f"{name!r} of stage {s} on {r}" for (s, name), r in zip(tie, on, strict=True))
            raise PipelineError(
                f"one weight is tied over stages on ranks that do not match one to one ({where}); place them on the "
                f"same ranks, or untie it"
            )
        shared += [SharedWeight(*tie[0], ranks, summed=True) for ranks in tp_shards if len(ranks) > 1]
    for stage, module in enumerate(stages.modules):
        if len(ranks := placement.ranks_of(stage)) > 1:
            names = [name for name in replicated_names(module) if (stage, name) not in tied]
            shared += [SharedWeight(stage, name, ranks, summed=False) for name in names]
    return shared


class _Open(NamedTuple):
    """`.grad` after a step without sync (`whole`) and its `version`; the part of it `summed` before, and the `rest`."""

    summed: torch.Tensor
    rest: torch.Tensor | None
    whole: torch.Tensor
    version: int


@final
class SharedWeights:
    """This rank's shared weights. Making it and `finish` are collective."""

    def __init__(
        self,
        stages: Stages,
        placement: Placement,
        shared: list[SharedWeight],
        processes: Processes,
        device: Device,
        sum_dtype: torch.dtype | None,
    ) -> None:
        rank = processes.rank
        together_on = dict.fromkeys(tuple(sorted(weight.ranks)) for weight in shared)  # in one order on all ranks
        on = device.torch_device
        groups = {ranks: processes.of_all_replicas(ranks, device.backend, on) for ranks in together_on}
        tied: dict[tuple[int, ...], list[nn.Parameter]] = {}
        #: Parameters that are counted on another rank.
        self.counted_elsewhere: set[nn.Parameter] = set()
        for weight in (weight for weight in shared if rank in weight.ranks):
            parameter, ranks = stages[weight.stage].get_parameter(weight.name), tuple(sorted(weight.ranks))
            with collective("making shared weights equal"), torch.no_grad():
                value = parameter.reshape(-1)
                source = processes.pipelines[processes.tp_shard][weight.ranks[0]]
                dist.broadcast(value.view(torch.uint8), source, groups[ranks])
                parameter.copy_(value.view(parameter.shape))
            if weight.summed:
                tied.setdefault(ranks, []).append(parameter)
            if weight.ranks[0] != rank:
                self.counted_elsewhere.add(parameter)
        #: This rank's parameters whose gradients are summed over ranks, and averaged over replicas at once.
        self.tied = [parameter for parameters in tied.values() for parameter in parameters]
        #: The sum of the ties of each group of ranks, in an order that is the same on all ranks.
        self.sums = {
            ranks: GradientAllReduce(parameters, groups[ranks], device, processes.num_replicas, sum_dtype)
            for ranks, parameters in tied.items()
        }
        self._starts_at_end = not is_queued(device)
        #: During a step: the part of each `.grad` that was summed before.
        self._held_back: dict[nn.Parameter, torch.Tensor | None] = {}
        self._open: dict[nn.Parameter, _Open] | None = None  # None after a step whose gradients were summed
        #: Those of this rank's stages that other ranks have, too: (stage, name, buffer).
        self.buffers = [*_copied_buffers(stages, placement, rank)]
        self._versions: list[int] = []

    def begin(self) -> None:
        """Hold back the part of each `.grad` that is already a sum, so that it is not summed again."""
        self._held_back = {parameter: self._hold_back(parameter) for parameter in self.tied}
        self._versions = [version_of(buffer) for _, _, buffer in self.buffers]

    def _hold_back(self, parameter: nn.Parameter) -> torch.Tensor | None:
        whole = parameter.grad
        if self._open is None:
            parameter.grad = None
            return whole
        left = self._open.get(parameter)
        if left is None or whole is None:  # nothing was summed, or the caller has cleared it
            return None
        if whole is left.whole and version_of(whole) == left.version:
            parameter.grad = left.rest
            return left.summed
        if whole.any():
            raise PipelineError(
                f"the gradient of a tied weight of shape {list(parameter.shape)} was changed between two steps, the "
                f"first one with sync=False; change gradients after a step with sync=True"
            )
        return None

    def finish(self, sync: bool = True) -> list[tuple[Mark, Mark]]:
        """Sum this step's gradients over the ranks of each tie, and add the earlier sum; without `sync`, sum later.

        Returns the marks around each sum. On a queued device the sums have been started.
        """
        for (stage, name, buffer), version in zip(self.buffers, self._versions, strict=True):
            if version_of(buffer) != version:
                raise PipelineError(
                    f"stage {stage} changes its buffer {name!r}, which stages on several ranks share, so their "
                    f"values would differ: use a layer without running statistics, or put it in eval()"
                )
        sums = [*self.sums.values()] if sync else []
        if self._starts_at_end:
            for tied_sum in sums:
                tied_sum.start()
        marks = [tied_sum.finish() for tied_sum in sums]
        self._open = None if sync else {}
        for parameter, summed in self._held_back.items():
            if summed is None:
                continue
            rest = parameter.grad
            if self._open is None:
                parameter.grad = summed if rest is None else summed.add_(rest)
            else:
                parameter.grad = whole = summed.clone() if rest is None else summed + rest
                self._open[parameter] = _Open(summed, rest, whole, version_of(whole))
        self._held_back = {}
        return marks


def _copied_buffers(stages: Stages, placement: Placement, rank: int) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Buffers of this rank's stages that stages on other ranks have, too."""
    places: dict[int, set[tuple[int, ...]]] = {}
    for stage, module in enumerate(stages.modules):
        for buffer in module.buffers():
            places.setdefault(id(buffer), set()).add(placement.ranks_of(stage))
    for stage in placement.stages_on(rank):
        for name, buffer in stages[stage].named_buffers():
            if len(places[id(buffer)]) > 1:
                yield stage, name, buffer
