"""The replica, rank and TP shard of each process, and its process groups.

mesh(pp=2, dp=2, tp=2)        replica 0        replica 1
                            rank 0  rank 1   rank 0  rank 1
TP shard 0 of each weight      0       2        4       6       processes 0, 2 are one pipeline; 0, 4 are replicas
TP shard 1                     1       3        5       7       of each other; 0, 1 hold TP shards of the same weights
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rota.core.errors import LostRankError, PipelineError, error_text
from rota.core.plan import Plan
from rota.core.programs.occupancy import MostCtas
from rota.runtime.device.local import CPU, local_device, local_device_type
from rota.runtime.environment import MESH
from rota.runtime.faults.hang_report import frames_of, place
from rota.runtime.faults.watchdog import show
from rota.runtime.process_group import abandon, group_timeout, join, leave
from rota.runtime.transport import collective
from rota.torch_internals import new_group

_DIMS = ("dp", "pp", "tp")  # outermost first: processes that communicate most are closest together
_HOSTS = "gloo"  # the backend of groups for what hosts agree on; it takes tensors on the CPU


def mesh(*, pp: int | None = None, dp: int = 1, tp: int = 1, timeout_s: float | None = None) -> DeviceMesh:
    """A mesh of `dp` replicas of a pipeline on `pp` ranks, each of `tp` processes; dims "dp", "pp" and "tp".

    Joins the processes that `rota run` or torchrun started, if nothing has done so yet.

    Args:
        pp: ranks of the pipeline. None: as `rota run --mesh` says, else as many as there are processes for.
        dp: replicas.
        tp: TP shards of each replica.
        timeout_s: as for `Pipeline`; the other processes have ten times that long to join.

    Raises:
        PipelineError: another number of processes was started, or one did not join in time.
    """
    join(timeout_s)
    size = dist.get_world_size()
    if pp is None and dp == tp == 1 and MESH in os.environ:
        dp, pp, tp = map(int, os.environ[MESH].split())
    elif pp is None:
        pp = max(size // (dp * tp), 1)
    if (needed := pp * dp * tp) != size:
        raise PipelineError(
            f"a mesh of pp={pp}, dp={dp}, tp={tp} is for {needed} processes, but {size} were started; start {needed}, "
            f"such as with `rota run --mesh pp={pp},dp={dp},tp={tp} plan.json script.py`"
        )
    kind = local_device_type()
    if kind != CPU and not torch.get_device_module(kind).is_initialized():
        local_device()  # otherwise PyTorch would take number LOCAL_RANK, even where only number 0 is visible
    with collective("making the mesh"):
        return init_device_mesh(kind, (dp, pp, tp), mesh_dim_names=_DIMS)


def local_stages(plan: Plan, mesh: DeviceMesh | None = None) -> tuple[int, ...]:
    """The stages that this process runs, as `Stages` numbers them.

    Joins the processes that `rota run` or torchrun started, if nothing has done so yet.

    Args:
        plan: the plan that the pipeline gets.
        mesh: the mesh that the pipeline gets.
    """
    join()
    num_stages, left = divmod(plan.placement.num_stages, plan.placement.num_components)
    return tuple(sorted({stage if left else stage % num_stages for stage in planned_stages(plan, mesh)}))


def planned_stages(plan: Plan, mesh: DeviceMesh | None) -> tuple[int, ...]:
    """The stages that the plan has on this process, of all its data streams; none if it has no such rank."""
    process = dist.get_rank()
    rank = next(pipeline.index(process) for pipeline in pipelines_of(mesh) if process in pipeline)
    return plan.placement.stages_on(rank)


def pipelines_of(mesh: DeviceMesh | None) -> list[list[int]]:
    """The processes of each pipeline by rank: all TP shards of the first replica, then of the next."""
    if mesh is None:
        return [[*range(dist.get_world_size())]]
    names = mesh.mesh_dim_names or ()
    if not names or not {*names} <= {*_DIMS}:
        raise PipelineError(
            f"the mesh has the dims {', '.join(map(repr, names)) or 'without names'}; name them among 'dp', 'pp' and "
            f"'tp', or make it with rota.mesh"
        )
    grid = mesh.mesh.permute([names.index(dim) for dim in _DIMS if dim in names])
    for position, dim in enumerate(_DIMS):
        if dim not in names:
            grid = grid.unsqueeze(position)
    pipelines: list[list[int]] = grid.movedim(1, 2).flatten(0, 1).tolist()
    if sorted(process for pipeline in pipelines for process in pipeline) != [*range(dist.get_world_size())]:
        raise PipelineError(
            f"the mesh has {mesh.size()} of {dist.get_world_size()} processes; make one of all of them, or start fewer"
        )
    if any(pipeline != sorted(pipeline) for pipeline in pipelines):
        raise PipelineError(f"along 'pp' the mesh has the processes {pipelines[0]}; list them in ascending order")
    return pipelines


@final
class Processes:
    """This process's place in a mesh, and its groups. Collective. Raises PipelineError if the mesh does not fit.

    `limit_s`: how long a rank may make no progress; the groups have `group_timeout(limit_s)`.
    """

    def __init__(self, mesh: DeviceMesh | None, limit_s: float = 0.0) -> None:
        self._timeout = group_timeout(limit_s)
        #: The processes of each pipeline by rank.
        self.pipelines: Final = pipelines_of(mesh)
        self.num_tp_shards: Final = mesh["tp"].size() if mesh is not None and "tp" in (mesh.mesh_dim_names or ()) else 1
        self.num_replicas: Final = len(self.pipelines) // self.num_tp_shards
        process = dist.get_rank()
        position = next(i for i, pipeline in enumerate(self.pipelines) if process in pipeline)
        #: Which replica this process belongs to, which TP shard of its weights it holds, and its rank in the plan.
        self.replica, self.tp_shard = divmod(position, self.num_tp_shards)
        self.pipeline_processes: Final = self.pipelines[position]
        self.rank: Final = self.pipeline_processes.index(process)
        self.is_first_pipeline: Final = position == 0
        self.is_first: Final = position == self.rank == 0
        self._groups: list[dist.ProcessGroup] = []
        self._groups_on_device: list[dist.ProcessGroup] = []
        self.everyone_on_device: dist.ProcessGroup | None = None
        self.replicas_on_device: dist.ProcessGroup | None = None
        #: Of the groups on the device that are made from now on; None: as many as NCCL likes.
        self.most_ctas: MostCtas | None = None
        try:
            self._make_groups()
        except BaseException:
            leave(self._groups)
            raise

    def _make_groups(self) -> None:
        """Make the groups of all processes, of this pipeline, of its replicas, and of its TP shards."""
        self.everyone: dist.ProcessGroup = self.of_everyone()
        alone, n = len(self.pipelines) == 1, self.num_tp_shards
        self.pipeline: dist.ProcessGroup = self.everyone if alone else self._made(self.pipeline_processes)
        #: The processes that hold the same weights as this one, one per replica.
        self.replica_processes = sorted(pipeline[self.rank] for pipeline in self.pipelines[self.tp_shard :: n])
        self.replicas = self._made(self.replica_processes) if self.num_replicas > 1 else None
        of_replica = self.pipelines[self.replica * n : self.replica * n + n]
        self.tp_group = self._made([pipeline[self.rank] for pipeline in of_replica]) if n > 1 else None

    @property
    def names(self) -> list[str]:
        """What reports call the processes, such as "rank 1 of replica 0, TP shard 1"."""
        named: dict[int, str] = {}
        for position, pipeline in enumerate(self.pipelines):
            replica, tp_shard = divmod(position, self.num_tp_shards)
            where = f" of replica {replica}" if self.num_replicas > 1 else ""
            where += f", TP shard {tp_shard}" if self.num_tp_shards > 1 else ""
            named |= {process: f"rank {rank}{where}" for rank, process in enumerate(pipeline)}
        return [named[process] for process in sorted(named)]

    def open_on_device(self, backend: str, device: torch.device) -> None:
        """Make the groups that take tensors of the stages' device, on the CPU those of the hosts. Collective; once."""
        if device.type == CPU:
            self.everyone_on_device, self.replicas_on_device = self.everyone, self.replicas
            return
        self.everyone_on_device = self._made(range(dist.get_world_size()), backend, device)
        if self.num_replicas > 1:
            self.replicas_on_device = self._made(self.replica_processes, backend, device)

    def of_everyone(self) -> dist.ProcessGroup:
        """A further group of all processes, for a thread of its own. Every process must call it."""
        group: dist.ProcessGroup = self._made(range(dist.get_world_size()))
        return group

    def of_ranks(self, ranks: Sequence[int], backend: str) -> Any:
        """The group of some of the plan's ranks, of this process's pipeline, which the caller opens; None on others."""
        return self._made([self.pipeline_processes[rank] for rank in ranks], backend, ranks=ranks)

    def of_all_replicas(self, ranks: Sequence[int], backend: str, device: torch.device) -> Any:
        """The group of these ranks of all replicas, for collectives on `device`; None on others."""
        pipelines = self.pipelines[self.tp_shard :: self.num_tp_shards]
        return self._made([pipeline[rank] for pipeline in pipelines for rank in ranks], backend, device, ranks)

    def _made(
        self,
        members: Sequence[int],
        backend: str = _HOSTS,
        device: torch.device | None = None,
        ranks: Sequence[int] = (),
    ) -> Any:
        """Make the group of these processes, None if this one is not among them. All make groups in the same order.

        `ranks`: those of the plan that the group is for.
        """
        if dist.get_rank() not in members:
            return None
        num_ctas = None if self.most_ctas is None else self.most_ctas.on(tuple(ranks))
        with collective("making process groups"):
            own = new_group(members, self._timeout, backend, num_ctas)
        (self._groups if backend == _HOSTS else self._groups_on_device).append(own)
        if device is not None:
            # A group's first collective makes its communicator, for which the hosts wait: it must not be one of a step.
            with collective("opening process groups"):
                dist.all_reduce(torch.zeros(1, device=device), group=own)
        return own

    def abort_on_device(self, error: BaseException | None) -> None:
        """After an error, end what the device still does with other ranks: leaving the groups would wait for that.

        After a lost rank, nothing behind this report is certain to run.
        """
        groups = self._groups_on_device
        if error is None or (isinstance(error, SystemExit) and not error.code) or not groups:
            return
        if dist.get_world_size() == 1:  # nothing waits for another rank
            return
        if isinstance(error, LostRankError):
            at = f" ({where})" if (where := place(frames_of(threading.get_ident()))) else ""
            show(f"rota: {self.names[dist.get_rank()]}: {error_text(error)}{at}")
        self._groups_on_device = []
        abandon(groups, error)

    def close(self) -> list[dist.ProcessGroup]:
        """Forget the groups; returns them, for `leave`."""
        groups, self._groups, self._groups_on_device = [*self._groups_on_device, *self._groups], [], []
        del self.everyone, self.pipeline, self.replicas, self.tp_group
        del self.everyone_on_device, self.replicas_on_device
        return groups
