"""For stages on several ranks: the ranks' process group, and collectives that autograd sees.

A stage on several ranks is an SPMD module: every rank runs it on the same values and returns the same values. Its
backward begins with the whole gradient of the output on every rank, and must end with the whole gradient of the inputs
on every rank. Megatron's pair of conjugates does that (Shoeybi et al., "Megatron-LM", 2019, section 3):

    x ──▶ copy_to_ranks ──▶ own TP shard of weights ───▶ sum_over_ranks ──▶ y
          backward: sum      gradients of TP shard        backward: unchanged

Without a group (None) all of these functions do nothing, so that the same module runs on one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rota.runtime.device.local import group_backend
from rota.runtime.meshes import pipelines_of
from rota.runtime.process_group import join
from rota.runtime.transport import collective
from rota.torch_internals import new_group

Group = dist.ProcessGroup | None
Module = TypeVar("Module", bound=nn.Module)

_REPLICATED = "_rota_replicated"  # an attribute of modules
_made: WeakSet[dist.ProcessGroup] = WeakSet()  # by `group`


def group(ranks: Iterable[int], mesh: DeviceMesh | None = None) -> Group:
    """The process group of a stage on several ranks. All of these must call it, and other ranks may.

    Joins the processes that `rota run` or torchrun started, if nothing has done so yet. The group takes tensors on the
    CPU, and on an accelerator if there is one.

    Args:
        ranks: the stage's ranks in the plan.
        mesh: the mesh that the pipeline gets; the ranks are those of this process's pipeline in it.

    Returns:
        The group, with ranks in ascending order: `group.rank()` is the number of this rank's TP shard of the weights.
        None for one rank, and on a rank outside the group.
    """
    join()
    process, ranks = dist.get_rank(), [*ranks]
    pipeline = next(pipeline for pipeline in pipelines_of(mesh) if process in pipeline)
    processes = [pipeline[rank] for rank in ranks]
    if len(ranks) < 2 or process not in processes:
        return None
    own = new_group(processes, None, group_backend())
    _made.add(own)
    return own


def open_groups(stages: Iterable[nn.Module], device: torch.device) -> None:
    """Make the communicators of the groups that modules of these stages hold, for which step 1 would wait. Collective.

    `stages`: in an order that all ranks have.
    """
    held = (value for stage in stages for module in stage.modules() for value in vars(module).values())
    for group in dict.fromkeys(value for value in held if isinstance(value, dist.ProcessGroup) and value in _made):
        with collective(_words("opening the group of", group)):
            dist.all_reduce(torch.zeros(1, device=device), group=group)


def copy_to_ranks(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Returns `x`, for each rank's own TP shard to use; backward sums the gradients of all ranks.

    Args:
        x: Any shape and dtype; the same values on all ranks.
        group: The stage's ranks, None for one rank.
    """
    return x if group is None else _apply(_Copy, x, group)


def sum_over_ranks(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Returns the sum of all ranks' `x`; backward passes the gradient on.

    Args:
        x: This rank's summand; shape and dtype are the same on all ranks.
        group: The stage's ranks, None for one rank.
    """
    return x if group is None else _apply(_Sum, x, group)


def gather_from_ranks(x: torch.Tensor, group: Group, dim: int = -1) -> torch.Tensor:
    """Returns all ranks' `x`, concatenated along `dim`; backward returns this rank's slice of the gradient.

    Args:
        x: This rank's slice; shape and dtype are the same on all ranks.
        group: The stage's ranks, None for one rank.
        dim: The dimension to concatenate along.
    """
    return x if group is None else _apply(_Gather, x, group, dim)


def replicated(module: Module) -> Module:
    """Mark `module`, inside a stage on several ranks, as held whole by each of them, not in TP shards; returns it.

    Its weights are made equal at the start, and count once in a norm. Every rank must compute their whole gradient.
    """
    vars(module)[_REPLICATED] = True
    return module


def replicated_names(module: nn.Module) -> Iterator[str]:
    """The parameters of `module` that `replicated` marks."""
    marked = [name for name, inner in module.named_modules() if _REPLICATED in vars(inner)]
    for name, _ in module.named_parameters():
        if any(not path or name.startswith(f"{path}.") for path in marked):
            yield name


def _apply(function: Any, *arguments: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*arguments)
    return result


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # noqa: ARG004
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ARG004
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.rank, ctx.size, ctx.dim = dist.get_rank(group), x.shape[dim], dim
        slices = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
        with collective(_words("gathering", group)):
            dist.all_gather(slices, x.contiguous(), group=group)
        return torch.cat(slices, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.narrow(ctx.dim, ctx.rank * ctx.size, ctx.size), None, None


def _summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    with collective(_words("summing", group)):
        dist.all_reduce(total, group=group)
    return total


def _words(doing: str, group: dist.ProcessGroup) -> str:
    ranks = dist.get_process_group_ranks(group)
    return f"{doing} the TP shards of a stage on ranks {', '.join(map(str, ranks))}"
