"""`tpc`: this process among replicas, pipeline stages and parts of tensors, on a DeviceMesh.

setup_process_groups([("data", 2), ("pipe", 2), ("tensor", 2)]), last entry innermost:

    process      0  1  2  3  4  5  6  7
    data         0  0  0  0  1  1  1  1
    pipe         0  0  1  1  0  0  1  1
    tensor       0  1  0  1  0  1  0  1         model: all with one data coordinate
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partialmethod
from typing import Any, final

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rota.errors import PipelineError
from rota.runtime.joining import join

_DIMS = {"data": "dp", "pipe": "pp", "tensor": "tp"}


@final
class ProcessTopology:
    """The groups of this process, by mode: "data", "pipe", "tensor" and "model". A mode not set up has size 1."""

    def __init__(self) -> None:
        self._mesh: DeviceMesh | None = None
        self._groups: dict[str, Any] = {}
        #: What ends with these groups.
        self.before_close = ExitStack()

    def setup_process_groups(self, config: Sequence[tuple[str, int]]) -> None:
        """Modes and sizes, the last one innermost; all processes call it alike. Raises PipelineError.

        Joins the processes that torchrun started, if nothing has done so yet. Called again, it starts afresh.
        """
        join()
        self.close()
        sizes = {mode: int(size) for mode, size in config}
        if len(sizes) < len(config) or not {*sizes} <= {*_DIMS}:
            given = ", ".join(repr(mode) for mode, _ in config)
            raise PipelineError(f"there are no modes {given}; give 'data', 'pipe' and 'tensor', each once at most")
        modes = [*(mode for mode in _DIMS if mode not in sizes), *sizes]
        shape = [sizes.get(mode, 1) for mode in modes]
        if (needed := math.prod(shape)) != (there := dist.get_world_size()):
            raise PipelineError(f"{sizes} is for {needed} processes, but {there} were started; start {needed}")
        self._mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(_DIMS[mode] for mode in modes))
        self._groups = {mode: self._mesh.get_group(dim) for mode, dim in _DIMS.items()}
        replicas = self._mesh.mesh.movedim(modes.index("data"), 0).flatten(1).tolist()
        self._groups["model"] = dist.new_subgroups_by_enumeration(replicas)[0]  # type: ignore[no-untyped-call]

    @property
    def mesh(self) -> DeviceMesh:
        """The processes as `rota.Pipeline` takes them."""
        if self._mesh is None:
            raise PipelineError("there are no process groups; call tpc.setup_process_groups([('pipe', …), …]) first")
        return self._mesh

    def close(self) -> None:
        """End what runs on the groups, and forget them."""
        self.before_close.close()
        self._mesh = None
        self._groups = {}

    def get_group(self, mode: str) -> Any:
        _ = self.mesh
        if mode not in self._groups:
            raise PipelineError(f"there is no mode {mode!r}; ask for one of {', '.join(map(repr, self._groups))}")
        return self._groups[mode]

    def get_ranks_in_group(self, mode: str) -> list[int]:
        """Process numbers, in order."""
        return dist.get_process_group_ranks(self.get_group(mode))

    def get_group_rank(self, mode: str) -> int:
        return dist.get_group_rank(self.get_group(mode), dist.get_rank())

    def get_group_size(self, mode: str) -> int:
        return len(self.get_ranks_in_group(mode))

    def is_mode_inited(self, mode: str) -> bool:
        """Whether more than one process shares this mode."""
        return mode in self._groups and self.get_group_size(mode) > 1

    def is_first_in_group(self, mode: str) -> bool:
        return self.get_group_rank(mode) == 0

    def is_last_in_group(self, mode: str) -> bool:
        return self.get_group_rank(mode) == self.get_group_size(mode) - 1

    get_tp_rank, get_tp_size = partialmethod(get_group_rank, "tensor"), partialmethod(get_group_size, "tensor")
    get_pp_rank, get_pp_size = partialmethod(get_group_rank, "pipe"), partialmethod(get_group_size, "pipe")
    get_dp_rank, get_dp_size = partialmethod(get_group_rank, "data"), partialmethod(get_group_size, "data")
    get_mp_rank, get_mp_size = partialmethod(get_group_rank, "model"), partialmethod(get_group_size, "model")
    is_first_in_tensor_group = partialmethod(is_first_in_group, "tensor")
    is_last_in_tensor_group = partialmethod(is_last_in_group, "tensor")
    is_first_in_pipeline_group = partialmethod(is_first_in_group, "pipe")
    is_last_in_pipeline_group = partialmethod(is_last_in_group, "pipe")
    is_first_in_data_group = partialmethod(is_first_in_group, "data")
    is_last_in_data_group = partialmethod(is_last_in_group, "data")
    is_first_in_model_group = partialmethod(is_first_in_group, "model")
    is_last_in_model_group = partialmethod(is_last_in_group, "model")

    def get_prev_global_rank(self, mode: str = "pipe") -> int:
        """The process before this one, the last before the first."""
        return self.get_ranks_in_group(mode)[self.get_group_rank(mode) - 1]

    def get_next_global_rank(self, mode: str = "pipe") -> int:
        """The process after this one, the first after the last."""
        ranks = self.get_ranks_in_group(mode)
        return ranks[(self.get_group_rank(mode) + 1) % len(ranks)]


#: The one topology of this process.
tpc = ProcessTopology()


def is_using_pp() -> bool:
    """Whether there is more than one pipeline stage."""
    return tpc.is_mode_inited("pipe")


def DDP(module: nn.Module, **options: Any) -> nn.Module:
    """PyTorch's DistributedDataParallel over this stage's replicas; a module without parameters as it is."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    return nn.parallel.DistributedDataParallel(module, process_group=tpc.get_group("data"), **options)
