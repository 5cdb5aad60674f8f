"""Rota's stages in the form that PyTorch's engine needs: flat tensors in and out, of shapes known beforehand.

    rank of stage s - 1 ──value──▶ rank of stage s: forward of micro-batch 0 ──value──▶ rank of stage s + 1

Before the first step of each shape a *survey* runs micro-batch 0 through all stages once. PyTorch's own, which
this replaces, feeds later stages uninitialized memory, and updates buffers such as BatchNorm's once too often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.func import functional_call

from rota.errors import PipelineError
from rota.interop.torch_backward import how_to_split
from rota.models import Stages, collect_losses
from rota.runtime.compute import op_seed
from rota.runtime.device.host import HostDevice
from rota.runtime.loss_weights import FirstLoss
from rota.runtime.losses import LossFn, loss_of
from rota.runtime.messages import Layout, describe, empty, flatten, hand_over, over_tensors, tensor_layouts, unflatten
from rota.runtime.precision import Autocast, under_autocast
from rota.runtime.transport import collective, receive_value, send_value
from rota.torch_internals import count_writes, writable

Tick = Callable[[str], None]  # called when an op begins

_CPU = HostDevice()


@dataclass(slots=True)
class Step:
    """The current step: each micro-batch's inputs, targets and share of the mean loss; its losses and outputs.

    `scale` multiplies gradients; `autocast` is on only in forwards.
    """

    inputs: list[Any]
    targets: list[Any]
    shares: list[float]
    scale: float = 1.0
    autocast: Autocast = ()
    seed: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Surveyed:
    """Layouts of the values that a stage receives and sends, and where its split backward runs."""

    incoming: Layout
    outgoing: Layout
    backward_at: Literal["I and W", "I", "W"]


_NOTHING: Layout = ("tuple", ())


class StageModule(nn.Module):
    """The module of PyTorch's stage. The last one returns its share of the loss, so that no order mixes up losses."""

    def __init__(self, stages: Stages, stage: int, loss_fn: LossFn | None, keep_outputs: bool, tick: Tick) -> None:
        super().__init__()
        self.module = stages[stage]  # registered: the engine asks for its parameters
        self.stages, self.stage, self.loss_fn, self.keep_outputs, self.tick = stages, stage, loss_fn, keep_outputs, tick
        self._loss_is_checked = False
        self.is_last = stage == stages.sink
        self.layouts = Surveyed(_NOTHING, _NOTHING, "I and W")
        self.step: Step

    def forward(self, *tensors: Tensor, microbatch: int) -> tuple[Tensor, ...]:
        """Run F of one micro-batch: from the tensors of the stage's incoming edges to those of its outgoing ones."""
        self.tick(f"{self.stage}F{microbatch}")
        torch.default_generator.manual_seed(op_seed(self.step.seed, self.stage, microbatch))
        entered = [*map(_entering, tensors)]
        value = unflatten(iter(entered), self.layouts.incoming)
        with under_autocast(self.step.autocast), collect_losses() as added:
            output = self.stages.call(self.stage, self._arguments(value), self.step.inputs[microbatch])
            if added.losses:
                raise PipelineError(
                    f"stage {self.stage} calls rota.add_loss, which PyTorch's engine does not support; run the plan on "
                    f"Rota's engine"
                )
            leaving, layout = self.leaving(output, microbatch)
        count_writes(tensors, entered)
        if layout != self.layouts.outgoing:
            raise PipelineError(
                f"stage {self.stage} made {describe(layout)} for micro-batch {microbatch}, but "
                f"{describe(self.layouts.outgoing)} for micro-batch 0, and PyTorch's engine receives into buffers made "
                f"beforehand; give it micro-batches of one shape, or run the plan by Rota's engine"
            )
        return tuple(tensor.contiguous() for tensor in leaving)

    def _arguments(self, value: Any) -> list[Any]:
        return [value] if self.stage > 0 else []

    def leaving(self, output: Any, microbatch: int) -> tuple[list[Tensor], Layout]:
        """The tensors that PyTorch sees, and the layout of the value that goes to the next stage."""
        if not self.is_last:
            (edge,) = self.stages.outgoing(self.stage)
            return flatten(edge.take(output), f"stage {self.stage}")
        if self.keep_outputs:
            # Cloned: it may be a view of a received buffer, which the next step uses again.
            self.step.outputs[microbatch] = hand_over(over_tensors(Tensor.clone, output))
        target = self.step.targets[microbatch]
        if self.loss_fn is None or target is None:
            return [], _NOTHING
        first = None
        if torch.is_grad_enabled() and not self._loss_is_checked:
            first = FirstLoss(self.loss_fn, output, target, self.stages, self.stage)
        loss, made = loss_of(self.loss_fn, output, target, _CPU)
        if first is not None:
            first.refuse(loss)
            self._loss_is_checked = True
        if made.count is not None or made.metrics:
            raise PipelineError(
                "loss_fn returned a count or metrics, but PyTorch's engine takes a mean loss alone; return the mean, "
                "or run the plan by Rota's engine"
            )
        self.step.losses[microbatch] = float(made.value)
        return [loss * (self.step.shares[microbatch] * self.step.scale)], _NOTHING

    def survey(self, value: Any) -> Any:
        """Run micro-batch 0 without a change to buffers, and note the layouts. Returns the tensors to send."""
        received, incoming = flatten(value, f"stage {self.stage - 1}")
        entered = unflatten(map(_entering, received), incoming)
        arguments = (*self._arguments(entered), *self.stages.pick_inputs(self.stage, self.step.inputs[0]))
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        with under_autocast(self.step.autocast), collect_losses():  # which `forward` refuses
            output = functional_call(self.module, buffers, arguments)
            leaving, layout = self.leaving(output, 0)
        split = how_to_split(received, leaving, self.module)
        self.layouts = Surveyed(incoming, layout, split)
        return hand_over(unflatten(iter(leaving), layout))


def _entering(tensor: Tensor) -> Tensor:
    """A received tensor whose gradient will be contiguous, because the engine sends it as it is."""
    entering = writable(tensor)
    if entering.requires_grad:
        entering.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
    return entering


def survey(modules: Sequence[StageModule], ranks: Sequence[int], group: dist.ProcessGroup) -> None:
    """Survey all stages; `modules` are this rank's in ascending order, `ranks` those of all stages. Collective."""
    value: Any = ()
    for module in modules:
        before, after = module.stage - 1, module.stage + 1
        if before >= 0 and ranks[before] != dist.get_rank(group):
            with collective("surveying the stages"):
                value = receive_value(ranks[before], group, torch.device("cpu"))
        value = module.survey(value if before >= 0 else ())
        if after < len(ranks) and ranks[after] != dist.get_rank(group):
            with collective("surveying the stages"):
                send_value(value, f"stage {module.stage}", ranks[after], group)


def torch_stage(module: StageModule, group: dist.ProcessGroup) -> PipelineStage:
    """PyTorch's stage around a surveyed module; with all shapes given, PyTorch runs no survey of its own."""
    layouts = module.layouts
    incoming, outgoing = (tuple(map(_example, tensor_layouts(each))) for each in (layouts.incoming, layouts.outgoing))
    cpu = torch.device("cpu")
    return PipelineStage(
        module, module.stage, len(module.stages), cpu, input_args=incoming, output_args=outgoing, group=group
    )


def _example(layout: Layout) -> Tensor:
    return empty(layout).requires_grad_(layout[3])
