"""What is compared: Rota's pipeline and its execution alone, PyTorch's runtime, and two loops by hand, on one order."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from by_hand import ByHand, OnStreamsOfGroup
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn.functional import mse_loss

from rota import Cluster, Costs, Pipeline, Plan, Stages, place
from rota.runtime.bound_actions import ThisRank
from rota.runtime.channels import Channels
from rota.runtime.compute import Batch, Compute
from rota.runtime.device.streams import StreamDevice
from rota.runtime.execution import Execution
from rota.runtime.meshes import Processes
from rota.runtime.messages import Format
from rota.runtime.microbatches import Microbatches
from rota.runtime.recorder import Record
from rota.runtime.transport import Transport
from rota.schedules import one_f_one_b, zb_h1

ROWS, WIDTH = 4, 8
LAYOUT = ("tensor", "float32", (ROWS, WIDTH), True)

Engine = tuple[Callable[[], object], Callable[[], object]]  # a step, and what is done between steps


def plan_for(num_ranks: int, num_microbatches: int, *, is_split: bool) -> Plan:
    costs = Costs.uniform(
        num_ranks, 5000, 5000 if is_split else 10000, 5000 if is_split else None, boundary_bytes=ROWS * WIDTH * 4
    )
    return (zb_h1 if is_split else one_f_one_b)(place(costs, Cluster.uniform(num_ranks)), num_microbatches)


def modules(num_ranks: int) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(num_ranks)]


def pipeline(plan: Plan, _: int) -> Engine:
    """All of `Pipeline.step`. What the hosts of the other ranks tell it is made up."""
    Transport.receive_layout = lambda *_: LAYOUT  # type: ignore[method-assign]
    Transport.take_flags = lambda *args: torch.ones_like(args[2][0])  # type: ignore[method-assign]
    Transport.all_reduce = _all_reduce  # type: ignore[method-assign]
    made = Pipeline(Stages(modules(plan.num_ranks)), plan, mse_loss, allow_nonfinite_loss=True)
    return lambda: made.step(), _nothing


def _all_reduce(_: Transport, tensor: torch.Tensor, *__: object, **___: object) -> None:
    """The other ranks make the same call, see `rota.runtime.agreement`: all ranks' calls, numbers, plans come last."""
    if tensor.dtype is torch.int64:
        by_rank = tensor[-3 * dist.get_world_size() :].view(3, -1)
        by_rank.copy_(by_rank.amax(1, keepdim=True).expand_as(by_rank))


def execution(plan: Plan, rank: int) -> Engine:
    """What is done per action, without what is done per step."""
    stages, device = Stages(modules(plan.num_ranks)), StreamDevice(torch.device("cpu"))
    processes = Processes(None)
    transport = Transport(processes.pipeline, processes.everyone)
    channels = Channels(plan, device, transport, processes)
    compute = Compute(stages, plan.placement, mse_loss, device=device)
    made = Execution(stages, plan, compute, ThisRank(rank, device, transport, Record(rank), channels))
    n = plan.num_microbatches
    made._bound.formats.update(
        {(edge, False, m): Format(LAYOUT) for edge in range(len(stages.edges)) for m in range(n)}
    )
    nones = Microbatches([None] * n)
    batch = Batch(nones, nones, [1 / n] * n)
    return lambda: made.run(batch, 1, False), made.settle


def pytorch(plan: Plan, rank: int) -> Engine:
    x = torch.empty(ROWS, WIDTH)
    module = modules(plan.num_ranks)[rank]
    stage = PipelineStage(module, rank, plan.num_ranks, torch.device("cpu"), input_args=x, output_args=module(x))
    schedule: Any = _PipelineScheduleRuntime([stage], plan.num_microbatches, loss_fn=mse_loss)
    schedule._warmup_p2p = lambda *_: setattr(stage, "_inference_mode", InferenceMode.STATIC)  # alone
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.csv")
        path.write_text(plan.to_csv(communication=True))
        schedule._load_csv(str(path), format="compute_comms")
    return lambda: schedule.step(return_outputs=False), _nothing


def by_hand(plan: Plan, rank: int) -> Engine:
    return _loop(ByHand, plan, rank)


def by_hand_on_streams_of_group(plan: Plan, rank: int) -> Engine:
    return _loop(OnStreamsOfGroup, plan, rank)


def _loop(kind: type[ByHand], plan: Plan, rank: int) -> Engine:
    ops = [(str(op.kind), op.microbatch) for op in plan.orders[rank]]
    return kind(modules(plan.num_ranks)[rank], ops, torch.empty(ROWS, WIDTH), rank).step, _nothing


def _nothing() -> None:
    pass


ENGINES: dict[str, Callable[[Plan, int], Engine]] = {
    "Rota, execution": execution,
    "Rota, pipeline": pipeline,
    "by hand": by_hand,
    "by hand, group's streams": by_hand_on_streams_of_group,
    "PyTorch": pytorch,
}
