"""`tpc`: this process's place among replicas, pipeline stages and tensor shards, as a DeviceMesh.

setup_process_groups([("data", 2), ("pipe", 2), ("tensor", 2)]), last entry innermost:

    process      0  1  2  3  4  5  6  7
    data         0  0  0  0  1  1  1  1
    pipe         0  0  1  1  0  0  1  1
    tensor       0  1  0  1  0  1  0  1         model: all processes with the same data coordinate
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

from rota.core.errors import PipelineError
from rota.runtime.process_group import join

_DIMS = {"data": "dp", "pipe": "pp", "tensor": "tp"}


@final
class ProcessTopology:
    """The groups of this process by mode: "data", "pipe", "tensor", "model". A mode that is not set up has size 1."""

    def __init__(self) -> None:
        self._mesh: DeviceMesh | None = None
        self._groups: dict[str, Any] = {}
        #: Callbacks for when these groups end.
        self.before_close = ExitStack()

    def setup_process_groups(self, config: Sequence[tuple[str, int]]) -> None:
        """Create the process groups. Collective.

        It initializes torch.distributed if nothing has done so yet. A second call replaces the groups.

        Args:
            config: Modes and sizes, the last mode innermost; the same on all processes.

        Raises:
            PipelineError: If a mode is unknown or given twice, or the sizes do not fit the number of processes.
        """
        join()
        self.close()
        sizes = {mode: int(size) for mode, size in config}
        if len(sizes) < len(config) or not {*sizes} <= {*_DIMS}:
            names = ", ".join(repr(mode) for mode, _ in config)
            raise PipelineError(f"config has the modes {names}; give 'data', 'pipe' and 'tensor', each at most once")
        modes = [*(mode for mode in _DIMS if mode not in sizes), *sizes]
        shape = [sizes.get(mode, 1) for mode in modes]
        if (needed := math.prod(shape)) != (started := dist.get_world_size()):
            raise PipelineError(f"{sizes} is for {needed} processes, but {started} were started; start {needed}")
        self._mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(_DIMS[mode] for mode in modes))
        self._groups = {mode: self._mesh.get_group(dim) for mode, dim in _DIMS.items()}
        replicas = self._mesh.mesh.movedim(modes.index("data"), 0).flatten(1).tolist()
        new_subgroups: Any = dist.new_subgroups_by_enumeration  # has no types
        self._groups["model"] = new_subgroups(replicas)[0]

    @property
    def mesh(self) -> DeviceMesh:
        """The processes as a DeviceMesh, for `rota.Pipeline`."""
        if self._mesh is None:
            raise PipelineError("there are no process groups; call tpc.setup_process_groups([('pipe', …), …]) first")
        return self._mesh

    def close(self) -> None:
        """End what uses the groups, and forget them."""
        self.before_close.close()
        self._mesh = None
        self._groups = {}

    def get_group(self, mode: str) -> Any:
        """Return the process group of a mode. Raises PipelineError."""
        _ = self.mesh
        if mode not in self._groups:
            raise PipelineError(f"there is no mode {mode!r}; ask for one of {', '.join(map(repr, self._groups))}")
        return self._groups[mode]

    def get_ranks_in_group(self, mode: str) -> list[int]:
        """Return the global ranks of a group, in order."""
        return dist.get_process_group_ranks(self.get_group(mode))

    def get_group_rank(self, mode: str) -> int:
        """Return this process's rank in a group."""
        return dist.get_group_rank(self.get_group(mode), dist.get_rank())

    def get_group_size(self, mode: str) -> int:
        """Return the number of processes in a group."""
        return len(self.get_ranks_in_group(mode))

    def is_mode_inited(self, mode: str) -> bool:
        """Return whether more than one process shares this mode."""
        return mode in self._groups and self.get_group_size(mode) > 1

    def is_first_in_group(self, mode: str) -> bool:
        """Return whether this process is the first in a group."""
        return self.get_group_rank(mode) == 0

    def is_last_in_group(self, mode: str) -> bool:
        """Return whether this process is the last in a group."""
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
        """Return the global rank of the previous process; the last one is before the first."""
        return self.get_ranks_in_group(mode)[self.get_group_rank(mode) - 1]

    def get_next_global_rank(self, mode: str = "pipe") -> int:
        """Return the global rank of the next process; the first one is after the last."""
        ranks = self.get_ranks_in_group(mode)
        return ranks[(self.get_group_rank(mode) + 1) % len(ranks)]


#: The topology of this process.
tpc = ProcessTopology()


def is_using_pp() -> bool:
    """Return whether there is more than one pipeline stage."""
    return tpc.is_mode_inited("pipe")


def DDP(module: nn.Module, **options: Any) -> nn.Module:
    """Return the module in PyTorch's DDP over this stage's replicas; one without parameters is returned unchanged."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    return nn.parallel.DistributedDataParallel(module, process_group=tpc.get_group("data"), **options)
