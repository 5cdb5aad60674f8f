"""`deepspeed.runtime.pipe.topology`: ranks as points of a grid with named axes, the last axis innermost."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rota.core.errors import PipelineError
from rota.runtime.process_group import join

_MESH_NAMES = {"pipe": "pp", "data": "dp", "model": "tp"}


class ProcessTopology:
    """A grid with `dims[i]` ranks along the axis `axes[i]`, in row-major order."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes = [*axes]
        self.dims = [*dims]
        make_class: Any = namedtuple  # mypy wants literal names
        self.ProcessCoord = make_class("ProcessCoord", self.axes)
        self._coords: list[Any] = [self.ProcessCoord(*coord) for coord in product(*map(range, self.dims))]
        self.mapping: dict[Any, int] = {coord: rank for rank, coord in enumerate(self._coords)}

    def __str__(self) -> str:
        return str(self.mapping)

    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self._coords)

    def get_axis_names(self) -> list[str]:
        """Return the names of the axes."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Return the number of ranks along an axis; 0 if there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coord: int) -> int:
        """Return the rank at a point, which has a value for every axis. Raises ValueError."""
        if {*coord} != {*self.axes}:
            raise ValueError(
                f"get_rank needs one value for each of {self.axes}, not {coord}; for part of a point use filter_match"
            )
        point = self.ProcessCoord(**coord)
        if point not in self.mapping:
            raise ValueError(f"{point} is outside of the topology's dims {self.dims}")
        return self.mapping[point]

    def get_coord(self, rank: int) -> Any:
        """Return the point of a rank, such as `get_coord(5).pipe`. Raises ValueError."""
        if not 0 <= rank < self.world_size():
            raise ValueError(f"rank {rank} is not in the topology: it has 0 to {self.world_size() - 1}")
        return self._coords[rank]

    def get_rank_repr(
        self, rank: int, omit_axes: Iterable[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Return the rank's point as text for file names, such as `model_01`."""
        omitted = {*omit_axes}
        named = zip(self.axes, self.get_coord(rank), strict=True)
        return outer_sep.join(f"{axis}{inner_sep}{i:02d}" for axis, i in named if axis not in omitted)

    def filter_match(self, **coord: int) -> list[int]:
        """Return the ranks whose points have these values. Raises ValueError."""
        unknown = next((axis for axis in coord if axis not in self.axes), None)
        if unknown is not None:
            raise ValueError(f"the topology has no axis {unknown!r}; it has {self.axes}")
        return [rank for rank, point in enumerate(self._coords) if coord.items() <= point._asdict().items()]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at `idx` along `axis`."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the lines of ranks along an axis; an empty list if there is no such axis."""
        if axis not in self.axes:
            return []
        lines: dict[Any, list[int]] = {}
        for rank, point in enumerate(self._coords):
            lines.setdefault(point._replace(**{axis: 0}), []).append(rank)
        return [*lines.values()]


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline and data parallelism, with replicas innermost, where links are fastest."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline, data and tensor parallelism, with tensor parallelism innermost, then replicas."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


def _prime_factors(number: int) -> list[int]:
    """Return the prime factors of a number in rising order. Raises ValueError if it is below 1."""
    if number < 1:
        raise ValueError(f"{number} has no prime factors; give 1 or more")
    factors, divisor = [], 2
    while number > 1:
        if number % divisor:
            divisor += 1
        else:
            factors.append(divisor)
            number //= divisor
    return factors


def _getter(attribute: str, docstring: str) -> Callable[[PipelineParallelGrid], Any]:
    """Return a method that returns an attribute: DeepSpeed has both."""

    def get(self: PipelineParallelGrid) -> Any:
        return getattr(self, attribute)

    get.__doc__ = docstring
    return get


class PipelineParallelGrid:
    """This process's place in a topology, and its process groups. Every process must create it.

    `mesh` is the topology as a DeviceMesh, for `rota.Pipeline`.

    Args:
        topology: The topology. None: the prime factors of the number of processes are assigned to pipeline and data
            parallelism in turn.

    Raises:
        PipelineError: If the topology has no axis 'pipe', or is for another number of processes.
    """

    def __init__(self, topology: ProcessTopology | None = None) -> None:
        join()
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if topology is None:
            pipe_and_data = [1, 1]
            for i, factor in enumerate(_prime_factors(self.world_size)):
                pipe_and_data[i % 2] *= factor
            topology = PipeDataParallelTopology(*pipe_and_data)
        self._topo = topology
        if not self._is_grid_valid() or "pipe" not in topology.axes:
            raise PipelineError(
                f"the topology has axes {topology.axes} with dims {topology.dims}, but {self.world_size} processes "
                f"were started; give it an axis 'pipe', and start {topology.world_size()}"
            )
        self.pipe_parallel_size, self.data_parallel_size, self.model_parallel_size = (
            max(topology.get_dim(axis), 1) for axis in ("pipe", "data", "model")
        )
        point = topology.get_coord(self.global_rank)
        self.stage_id, self.data_parallel_id = int(point.pipe), int(getattr(point, "data", 0))
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self.mesh = DeviceMesh(
            "cpu",
            torch.arange(self.world_size).view(*topology.dims),
            mesh_dim_names=tuple(_MESH_NAMES.get(axis, axis) for axis in topology.axes),
        )
        self.pipe_groups, self.dp_groups = (topology.get_axis_comm_lists(axis) for axis in ("pipe", "data"))
        self.pp_group, self.pp_proc_group = self._along("pipe")
        self.dp_group, self.dp_proc_group = self._along("data")
        self.slice_group, self.slice_proc_group = self._along("model")
        replicas = [topology.get_axis_list("data", i) for i in range(topology.get_dim("data"))]
        replicas = replicas or [[*range(self.world_size)]]
        self.ds_model_group = self._own_line(replicas)
        self.ds_model_proc_group = _process_group(replicas)
        #: Each rank and the next one in its pipeline; after the last comes the first.
        self.p2p_groups = sorted([line[i - 1], rank] for line in self.pipe_groups for i, rank in enumerate(line))

    def _along(self, axis: str) -> tuple[list[int], Any]:
        """Return the ranks on this process's line along an axis (only itself without the axis) and their group."""
        if axis in self._topo.axes:
            return self._own_line(self._topo.get_axis_comm_lists(axis)), self.mesh.get_group(_MESH_NAMES[axis])
        alone = [[rank] for rank in range(self.world_size)]
        return [self.global_rank], _process_group(alone)

    def _own_line(self, lines: list[list[int]]) -> list[int]:
        return next(line for line in lines if self.global_rank in line)

    def _is_grid_valid(self) -> bool:
        return self._topo.world_size() == self.world_size

    def topology(self) -> ProcessTopology:
        """Return the topology."""
        return self._topo

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank of a stage in this process's replica, or at the values of `kwargs` along other axes."""
        point = self._topo.get_coord(self.global_rank)
        return self._topo.get_rank(**point._replace(pipe=stage_id, **kwargs)._asdict())

    def get_model_parallel_rank(self) -> int:
        """Return the rank among all processes of one copy of the model, as DeepSpeed defines it."""
        return self.ds_model_group.index(self.global_rank)

    def get_model_parallel_world_size(self) -> int:
        """Return the number of processes of one copy of the model."""
        return len(self.ds_model_group)

    def get_slice_parallel_rank(self) -> int:
        """Return the rank among the tensor-parallel processes of this stage."""
        return self.slice_group.index(self.global_rank)

    get_stage_id = get_pipe_parallel_rank = _getter("stage_id", "Return this process's pipeline stage.")
    get_data_parallel_id = get_data_parallel_rank = _getter("data_parallel_id", "Return this process's replica.")
    get_global_rank = _getter("global_rank", "Return this process's rank among all processes.")
    get_pipe_parallel_world_size = _getter("pipe_parallel_size", "Return the number of pipeline stages.")
    get_pipe_parallel_group = _getter("pp_proc_group", "Return the process group of this process's pipeline.")
    get_data_parallel_world_size = _getter("data_parallel_size", "Return the number of replicas.")
    get_data_parallel_group = _getter("dp_proc_group", "Return the process group of this stage's replicas.")
    get_model_parallel_group = _getter("ds_model_proc_group", "Return the process group of one copy of the model.")
    get_slice_parallel_world_size = _getter("model_parallel_size", "Return the tensor-parallel processes per stage.")
    get_slice_parallel_group = _getter("slice_proc_group", "Return the group of the stage's tensor-parallel processes.")


def _process_group(lines: list[list[int]]) -> Any:
    new_subgroups: Any = dist.new_subgroups_by_enumeration  # has no types
    return new_subgroups(lines, backend="gloo")[0]
