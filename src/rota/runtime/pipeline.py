"""Pipeline: runs a checked plan on `torch.distributed`, one process a rank, with one loop over its actions."""

from __future__ import annotations

import atexit
import math
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from rota.checking import check
from rota.errors import PipelineError
from rota.models import Stages
from rota.plan import Plan
from rota.runtime import batches
from rota.runtime.compute import Batch, Compute, LossFn
from rota.runtime.gradients import hand_over, warm_up
from rota.runtime.handover import digest, leave_record
from rota.runtime.program import Action, ValueKey, compile_program, refuse_unsupported
from rota.runtime.recorder import Record, clock_offset_ns, merge
from rota.runtime.transport import Transport, together
from rota.runtime.watchdog import Watchdog
from rota.tasks import Kind, Op
from rota.timeline import Timeline


@final
class Pipeline:
    """A model's stages, run as planned; every rank makes one, with the same arguments.

    `loss_fn(output, target)` returns the mean loss of a micro-batch, a tensor with one element; None for a plan of
    forwards alone. A rank that makes no progress inside a step for `timeout_s` is ended, and says what it waited
    for. `dynamic_shapes`: shapes depend on the data, not only on the inputs' shapes. `keep_outputs`: the last
    stage's outputs stay in `outputs` (always so in a plan of forwards).

    Raises PlanError where `check` refuses the plan, PipelineError where plan, stages and processes do not fit.
    """

    def __init__(
        self,
        stages: Stages,
        plan: Plan,
        loss_fn: LossFn | None,
        *,
        timeout_s: float = 60.0,
        dynamic_shapes: bool = False,
        keep_outputs: bool = False,
    ) -> None:
        check(plan)
        edge_index = {(edge.source, edge.target): i for i, edge in enumerate(stages.edges)}
        refuse_unsupported(plan, edge_index, len(stages))
        self.stages, self.plan, self.loss_fn = stages, plan, loss_fn
        self._trains = any(task.kind.makes_weight_gradients for task in plan.placement.tasks)
        if self._trains and loss_fn is None:
            raise PipelineError("the plan has backwards, so a loss_fn(output, target) is needed")
        if self._trains:
            warm_up()
        self._dynamic_shapes = dynamic_shapes
        self._owns_process_group = not dist.is_initialized()
        self._loss_rank = plan.placement.ranks_of(stages.sink)[0]
        self._compute = Compute(stages, plan.placement, loss_fn, keep_outputs or not self._trains)
        self._join_processes()
        self._incoming = [[edge_index[e.source, e.target] for e in stages.incoming(s)] for s in range(len(stages))]
        self._outgoing = [[edge_index[e.source, e.target] for e in stages.outgoing(s)] for s in range(len(stages))]
        self._program = compile_program(plan, edge_index, self.rank)
        self._transport = Transport(self._group)
        self._watchdog = Watchdog(self.rank, timeout_s, self._doing)
        self._action: Action | None = None  # what the watchdog tells; None before the first and after the last
        self._signature: object = None
        self._record = Record(self.rank, clock_offset_ns(self._group))
        self._local: dict[ValueKey, Any] = {}
        self._complete = self._closed = False
        atexit.register(self.close)

    # --- the processes --------------------------------------------------------------------------------------------

    def _join_processes(self) -> None:
        if self._owns_process_group:
            if "RANK" not in os.environ:
                raise PipelineError(
                    "no process group: start the script by `rota run plan.json script.py` or torchrun, or call "
                    "torch.distributed.init_process_group first"
                )
            dist.init_process_group("gloo")
        plans: list[Any] = [None] * dist.get_world_size()
        with together("comparing plans"):  # before anything that could fail on one rank alone
            dist.all_gather_object(plans, digest(self.plan))
        for rank, other in enumerate(plans):
            if other != plans[0]:
                raise PipelineError(f"rank {rank} has another plan than rank 0; give all ranks the same plan")
        if dist.get_world_size() != self.plan.num_ranks:
            raise PipelineError(
                f"the plan is for {self.plan.num_ranks} ranks, but {dist.get_world_size()} processes were started; "
                f"start {self.plan.num_ranks}, or plan for {dist.get_world_size()}"
            )
        self.rank = dist.get_rank()
        for stage in self.plan.placement.stages_on(self.rank):
            for name, tensor in self.stages[stage].state_dict().items():
                if tensor.device.type != "cpu":
                    raise PipelineError(f"{name} of stage {stage} is on {tensor.device}; only CPU stages can be run")
        self._group = dist.new_group(backend="gloo")

    @property
    def local_stages(self) -> dict[int, nn.Module]:
        """The stages on this rank."""
        return {stage: self.stages[stage] for stage in self.plan.placement.stages_on(self.rank)}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters of this rank's stages."""
        for module in self.local_stages.values():
            yield from module.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages: what this rank's optimizer takes."""
        return (parameter for _, parameter in self.named_parameters())

    @property
    def losses(self) -> dict[int, float]:
        """Loss of each micro-batch of the last step, on the rank of the last stage."""
        return self._compute.losses

    @property
    def outputs(self) -> dict[int, Any]:
        """Output of each micro-batch of the last step, likewise, if they are kept."""
        return self._compute.outputs

    # --- one step -------------------------------------------------------------------------------------------------

    def step(self, inputs: Any = None, targets: Any = None) -> float:
        """Run the plan once; gradients are added to `.grad`, as `loss.backward()` does. Collective.

        `inputs`: what the stages on this rank read (None where they read nothing): a tensor, a tuple or a dict of
        them, split along dim 0 into the plan's micro-batches, or a list of micro-batches. `targets`: likewise, for
        the rank of the last stage. Returns the mean loss on every rank (nan without a loss_fn).
        """
        if self._closed:
            raise PipelineError("the pipeline is closed; make a new one")
        batch = self._prepare(inputs, targets)
        self._watchdog.begin()
        seed = int(torch.randint(2**62, ()))
        random_state = torch.get_rng_state()
        try:
            fresh = self._agree_on_layouts(batch)
            self._begin_step(batch, seed)
            with torch.set_grad_enabled(self._trains):
                for action in self._program.strict if fresh else self._program.overlapped:
                    self._action = action
                    self._watchdog.tick()
                    self._do(action, fresh)
            self._action = None
            self._transport.drain()
            loss = self._mean_loss(batch.shares)
        finally:
            self._watchdog.end()
            # Each rank has drawn one number, whatever its stages drew: shuffles stay the same on all ranks.
            torch.set_rng_state(random_state)
        self._complete = True
        return loss

    def _prepare(self, inputs: Any, targets: Any) -> Batch:
        n = self.plan.num_microbatches
        for stage in self.local_stages:
            if self.stages.inputs[stage] and inputs is None:
                raise PipelineError(
                    f"rank {self.rank} holds stage {stage}, which reads the step's inputs "
                    f"{list(self.stages.inputs[stage])}, but got inputs=None; pass the batch on this rank too"
                )
        given = batches.to_microbatches("inputs", inputs, n), batches.to_microbatches("targets", targets, n)
        missing = [m for m, target in enumerate(given[1]) if target is None]
        if self.rank == self._loss_rank and self._trains and missing:
            got = "targets=None" if targets is None else f"targets[{missing[0]}] = None"
            raise PipelineError(f"rank {self.rank} holds the last stage, but got {got}; pass them on this rank")
        return Batch(*given, batches.weights(inputs, targets, n))

    def _agree_on_layouts(self, batch: Batch) -> bool:
        """Whether any rank has reason to expect other layouts at the boundaries than in the last step."""
        signature = (
            [batches.shapes(microbatch) for microbatch in batch.inputs],
            [(m.training, [p.requires_grad for p in m.parameters()]) for m in self.local_stages.values()],
        )
        changed = torch.tensor([int(self._dynamic_shapes or signature != self._signature)])
        with together("waiting for the others to begin the step"):
            dist.all_reduce(changed, dist.ReduceOp.MAX, group=self._group)
        self._signature = signature
        return bool(changed.item())

    def _begin_step(self, batch: Batch, seed: int) -> None:
        self._record.starts_ns, self._record.ends_ns = [], []
        self._record.sent_ns, self._record.through_ns = {}, {}
        self._transport.sent_ns, self._transport.through_ns = self._record.sent_ns, self._record.through_ns
        self._complete = False
        self._local.clear()
        self._compute.begin(batch, seed)

    def _do(self, action: Action, fresh: bool) -> None:
        if action.message is None:
            self._run(action.op)
        elif action.what == "receive":
            self._transport.post(action.message, with_layout=fresh)
        else:
            value = self._local.pop(action.message.value)
            if action.message.value[1]:
                self._transport.send_gradients(action.message, value)
            else:
                self._transport.send_value(action.message, value, with_layout=fresh)

    def _run(self, op: Op) -> None:
        reads, makes, is_gradient = self._boundary(op)
        received = [self._take((edge, is_gradient, op.microbatch)) for edge in reads]
        start_ns = time.monotonic_ns()
        made = self._compute.run(op, received)
        self._record.starts_ns.append(start_ns)
        self._record.ends_ns.append(time.monotonic_ns())
        for edge, value in zip(makes, made, strict=True):
            self._local[edge, is_gradient, op.microbatch] = value

    def _boundary(self, op: Op) -> tuple[list[int], list[int], bool]:
        """The edges that an op reads and those that it makes, and whether they carry gradients."""
        if op.kind is Kind.F:
            return self._incoming[op.stage], self._outgoing[op.stage], False
        if op.kind in (Kind.B, Kind.I):
            return self._outgoing[op.stage], self._incoming[op.stage], True
        return [], [], False

    def _take(self, key: ValueKey) -> Any:
        if key in self._program.arriving:
            return self._transport.take(key)
        value = self._local.pop(key)
        return value if key[1] else hand_over(value)

    def _mean_loss(self, shares: list[float]) -> float:
        mean = sum(shares[m] * loss for m, loss in self.losses.items()) if self.losses else math.nan
        total = torch.tensor([mean if self.rank == self._loss_rank else 0.0], dtype=torch.float64)
        with together(f"waiting for the loss from rank {self._loss_rank}"):
            dist.broadcast(total, group_src=self._loss_rank, group=self._group)
        return float(total)

    def _doing(self) -> str:
        action, oldest = self._action, self._transport.oldest
        if action is None and oldest is not None:
            return f"waited for rank {oldest.receiver} to receive {oldest}"
        if action is None:
            return "waited for the other ranks to reach the same step"
        if action.what == "run":
            waits = [t for t in self.plan.transfers if t.target == action.op and t.receiver == self.rank]
            told = " or ".join(f"{t} from rank {t.sender}" for t in waits)
            return f"was at {action.op}" + (f" (which waits for {told})" if told else "")
        assert action.message is not None
        transfer = action.message.transfer
        return f"was at {transfer} between rank {transfer.sender} and rank {transfer.receiver}"

    # --- afterwards -----------------------------------------------------------------------------------------------

    def timeline(self) -> Timeline:
        """What the last step's ops and transfers really took, on every rank. Collective."""
        if self._closed or not self._complete:
            raise PipelineError("there is no timeline: ask for it after a step that ran to its end, and before close")
        records: list[Any] = [None] * self.plan.num_ranks
        dist.all_gather_object(records, self._record.to_fields(), group=self._group)
        return merge(self.plan, [Record.from_fields(fields) for fields in records])

    def close(self) -> None:
        """End the pipeline's threads, and leave the last step's record where `rota run --timeline` wants it."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._watchdog.close()
        self._transport.close()
        if self._complete:
            leave_record(self.plan, self._record)
        group = dist.group.WORLD if self._owns_process_group else self._group
        del self._group  # the last reference: closes the group's connections, which tells the peers
        if dist.is_initialized():
            with suppress(ValueError):  # the caller has destroyed it
                dist.destroy_process_group(group)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
