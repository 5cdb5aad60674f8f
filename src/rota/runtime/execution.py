"""One plan on one rank: the loop over its actions, and what they are doing when somebody asks.

agreed batch ──▶ receive ▸ run op ▸ send ▸ receive ▸ …, see `bound_actions` ──▶ all sends through ──▶ times, on request
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Literal, final

import torch

from rota.core.errors import PipelineError
from rota.core.plan import Plan
from rota.core.programs.actions import Action
from rota.core.programs.device_steps import COMPUTE, Step
from rota.core.tasks import Kind
from rota.models import Stages, collect_losses
from rota.runtime.bound_actions import Bound, BoundActions, Hooks, RunState, ThisRank, op_of
from rota.runtime.compute import Batch, Compute
from rota.runtime.device.protocol import is_queued
from rota.runtime.faults.hang_report import Doing, is_in_a_collective
from rota.runtime.gradients.forward_backward import refuse_modes_without_gradients
from rota.runtime.layouts import KnownLayouts, Layouts, Size
from rota.runtime.memory_watch import MemoryWatch
from rota.runtime.messages import describe_value
from rota.runtime.recorder import Marks


@final
class Execution:
    """Runs `plan` on this rank, once per `run`; `compute` does the ops.

    `sizes`: of each micro-batch, as all ranks know them, such as (rows, length). `known`: what was learned of layouts
    at such sizes.
    """

    def __init__(
        self,
        stages: Stages,
        plan: Plan,
        compute: Compute,
        here: ThisRank,
        hooks: Hooks | None = None,
        sizes: Sequence[Size] = (),
        known: KnownLayouts | None = None,
    ) -> None:
        self.plan, self.compute, self.record = plan, compute, here.record
        self.trains = any(task.kind.makes_weight_gradients for task in plan.placement.tasks)
        self.is_queued = here.device.is_queued
        #: What a queued device did when `look` asked last, and how many kernels of the last run it had ended.
        self.on_device: Doing | None = None
        self.num_reached = 0
        #: Whether the last run has reached its end.
        self.complete, self._is_settled = False, True
        self._stages, self._transport, self._device, self._channels = stages, here.transport, here.device, here.channels
        self._run = RunState(here.device.mark)
        self._bound = BoundActions(stages, plan, compute, here, self._run)
        modules = [stages[stage] for stage in plan.placement.stages_on(here.rank)]
        known = known if sizes and known is not None else KnownLayouts()
        self._layouts = Layouts(modules, sizes, known, self._bound.keys_elsewhere(), self._bound.formats)
        #: What the run is at, None before the first action and after the last.
        self.at: Action | Step | None = None
        self._awaited = ""  # what the rank waits for outside of its actions
        self._steps: list[Bound] = []  # of the run that goes on, or the last one
        self.bind(hooks or Hooks())

    @property
    def marks(self) -> Marks:
        """The moments of the run that goes on, or the last one."""
        return self._run.marks

    def bind(self, hooks: Hooks) -> None:
        """Let all later runs have these hooks."""
        self._actions = self._bound.bind(hooks)

    def is_new(self, batch: Batch) -> Literal[0, 1, 2]:
        """0: this rank knows the layouts of all its messages; 1: not all; 2: what all ranks know is to be forgotten."""
        are_known, is_same_context = self._layouts.find(batch)
        if not is_same_context:
            return 2
        return 0 if are_known and (self._transport.flags.are_known or not self.trains) else 1

    def forget_layouts(self) -> None:
        """What is called on all ranks before they learn all layouts again."""
        self._layouts.known.forget()

    def forget(self) -> None:
        """Make the next run exchange layouts again, as the failed run may not have done so."""
        self._layouts.known.context = None
        self._transport.flags.are_known = False

    # --- one run ------------------------------------------------------------------------------------------------------

    def run(self, batch: Batch, seed: int, learns: bool, watch: MemoryWatch | None = None) -> None:
        """Run all actions. If it `learns`, values are sent with their layouts. `watch` sees each op's end.

        On a queued device all actions have been enqueued when it returns.
        """
        if self.trains:
            refuse_modes_without_gradients()
        actions = self._actions[learns]
        self._begin(batch, learns, actions)
        torch.clear_autocast_cache()  # it may hold weights from before an optimizer's step
        with collect_losses() as added, torch.set_grad_enabled(self.trains):
            self.compute.begin(batch, seed, learns, added)
            try:
                for self.at, act in actions:
                    act()
                    if watch is not None and self.at.what == "run":  # here, where the op's own variables are gone
                        watch.op_ended(op_of(self.at))
            except PipelineError:
                raise
            except Exception as error:
                self._explain(error)
                raise
            finally:
                added.losses.clear()
        self.at = None
        (self._channels or self._transport).drain()
        if self.trains:
            self._transport.flags.end(self._stages.edges, self._bound.program.num_gradients_sent)
        if learns:
            self._layouts.learn()
        self.complete, self._is_settled = True, False

    def _begin(self, batch: Batch, learns: bool, actions: list[Bound]) -> None:
        self._run.behind[:] = []  # before its marks are used again
        if is_queued(self._device) and not self._is_settled:  # nobody has asked for the times of the step before
            self._device.reuse(self.marks.on_device)
        self._run.marks, self.complete, self._is_settled = Marks(), False, True
        self.record.microbatch_rows = batch.rows[0] if len({*batch.rows}) == 1 else None
        self._run.values[:] = [None] * len(self._bound.slots)
        self._device.begin()
        if self._bound.offloading is not None:
            self._bound.offloading.begin()
        (self._channels or self._transport).begin(self.marks)
        if is_queued(self._device):
            self._run.compute = self._device.stream(COMPUTE)
            self._run.mark = partial(self._device.mark_on, self._run.compute)
            self._steps = actions
            self._run.behind[:] = [None] * len(actions)
        if self.trains:
            self._transport.flags.begin(learns)

    def settle(self) -> None:
        """Put the times of the last run into `record`. On a queued device the host waits for the run to end."""
        if not self._is_settled:
            self.record.settle(self.marks, self._device)
            self._is_settled, self._run.behind[:] = True, []

    def _explain(self, error: Exception) -> None:
        """Raises PipelineError if an op's error is told by how the op was run; else adds its place to the error."""
        at = self.at
        if at is None or at.what != "run":
            return
        op = op_of(at)
        if (refusal := self.compute.explain(op, error)) is not None:
            raise refusal from error
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        received = next((frame.f_locals.get("received") for frame in frames if frame.f_code.co_name == "run_op"), None)
        name = type(self._stages[op.stage]).__name__
        where = f"rota: in {op} on rank {self.record.rank}, stage {op.stage} ({name})"
        error.add_note(f"{where}, which received {', '.join(map(describe_value, received))}" if received else where)

    # --- what it does -------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Ask a queued device what it has reached. Any thread may call it; a device that is stuck may never answer."""
        if is_queued(self._device):
            behind = [*self._run.behind]
            done = [mark is None or self._device.is_done(mark) for mark in behind]
            self.num_reached = sum(done) - behind.count(None)
            self.on_device = self._doing_on_device(done)

    def _doing_on_device(self, done: list[bool]) -> Doing | None:
        """What the device does or waits for, if it has not ended what the host has enqueued."""
        first: dict[str, Step] = {}  # of each stream, those that it has not ended
        for (step, _), is_done in zip(self._steps, done, strict=False):  # none is unfinished once the times are known
            if not is_done and isinstance(step, Step):
                first.setdefault(step.stream, step)
        if not first:
            return None
        at = ", ".join(f"{step} on {stream}" for stream, step in first.items())
        running = [step for step in first.values() if all(done[before] for before in step.waits)]
        if any(step.what == "run" and step.communicator is None for step in running):
            return Doing(False, f"has not ended on its device: {at}")
        return Doing(True, f"waits on its device for other ranks: {at}")

    def awaits(self, words: str) -> None:
        """From now on the rank waits for what these words say, outside of its actions."""
        self._awaited = words

    def doing(self, frames: list[FrameType]) -> Doing:
        """What the run is doing, or what it waits for, by the stack of the thread that runs it."""
        at, oldest = self.at, self._transport.oldest
        if not isinstance(at, Step) and self.on_device is not None:
            return self.on_device
        if (message := self._transport.awaited(frames)) is not None:
            return Doing(True, f"waits for {message.transfer} from rank {message.transfer.sender}")
        if at is None and oldest is not None:
            return Doing(True, f"waits for rank {oldest.receiver} to receive {oldest}")
        waits = is_in_a_collective(frames)
        if at is None:
            return Doing(waits, f"waits for {self._awaited}" if waits else f"keeps others waiting for {self._awaited}")
        if isinstance(at, Step):
            return Doing(waits, f"enqueues {at}")
        if at.message is None:
            return Doing(waits, f"waits for other ranks in {at.op}" if waits else f"is at {at.op}")
        transfer = at.message.transfer
        return Doing(waits, f"is at {transfer} between rank {transfer.sender} and rank {transfer.receiver}")

    def last(self) -> str:
        """The last op that ended, or was enqueued."""
        num_ended = len(self.marks.ends)
        return f"after {self._bound.order[num_ended - 1]}" if num_ended else "before its first op"


def forwards_of(plan: Plan) -> Plan:
    """The plan's forwards only, in its order. Forwards wait only for forwards, so they cannot wait in a cycle."""
    orders = tuple(tuple(op for op in order if op.kind is Kind.F) for order in plan.orders)
    served = tuple(
        tuple(transfer for transfer in order if transfer.source.kind is transfer.target.kind is Kind.F)
        for order in plan.service_orders
    )
    return replace(plan, placement=plan.placement.forward_only(), orders=orders, service_orders=served)
