"""Runs one stage's forward and backward repeatedly, whole, split or recomputed, on the values it gets in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias, final

import torch

from rota.models import Stages, collect_losses
from rota.models.randomness import random_state_kept
from rota.models.sequence_chunks import Chunk
from rota.profiling.clocks import Laps, Run
from rota.profiling.peak_memory import StorageWatch, copier
from rota.runtime.device.choosing import device_at
from rota.runtime.gradients.forward_backward import (
    Kept,
    StageForward,
    backward,
    backward_inputs,
    gradient_edges,
    keep_loss,
    pass_on,
)
from rota.runtime.gradients.recompute import Again, without_activations
from rota.runtime.gradients.split_backward import Gradients, WeightWork
from rota.runtime.losses import LossFn, loss_of
from rota.runtime.memory_watch import storages
from rota.runtime.messages import flatten, hand_over, over_tensors
from rota.runtime.precision import ambient_autocast, without_autocast
from rota.torch_internals import address_of

MakeOptimizer: TypeAlias = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class Workload(NamedTuple):
    """What is profiled: the stages, one micro-batch, and the loss function.

    `earlier`: the chunks of a sample before the micro-batch, if it is a chunk, and `has_later` whether others follow.
    """

    stages: Stages
    batch: Any
    target: Any
    loss_fn: LossFn | None
    earlier: tuple[Any, ...] | None = None
    has_later: bool = False


class Earlier(NamedTuple):
    """What a stage reads of earlier chunks: their length together, and for each what it passed on."""

    start: int
    passed_on: list[list[torch.Tensor]]


class StageBytes(NamedTuple):
    """The bytes that a stage holds: after F, after I (0 for a whole backward), and after F if F is recomputed."""

    kept: int
    waiting: int
    checkpoint: int


@final
class StageRun:
    """One stage that receives `received`, one value per incoming edge. Making it runs it once, to warm up.

    `split`: F, I and W instead of F and B. `recompute`: F keeps nothing, and R comes before the backward. `earlier`: if
    the micro-batch is a chunk.
    """

    def __init__(
        self,
        workload: Workload,
        stage: int,
        received: list[Any],
        *,
        split: bool = False,
        recompute: bool = False,
        earlier: Earlier | None = None,
    ) -> None:
        self._earlier = earlier
        self.stage, self.received, self.split, self.recompute = stage, received, split, recompute
        stages, self.workload = workload.stages, workload
        self._forwards = {is_split: StageForward(stages, stage, split=is_split) for is_split in (False, True)}
        devices = [tensor.device for tensor in (*stages[stage].parameters(), *tensors_of(received))]
        accelerators = (device for device in devices if device.type not in ("cpu", "meta"))
        self.device = device_at(next(accelerators, torch.device("cpu")))
        #: The stage's output, and the value that leaves by each outgoing edge.
        self.output, self.values, kept = self.forward(self._leaves(), split=True)
        del kept
        self.output, self.values = hand_over(self.output), [hand_over(value) for value in self.values]
        roots = self.values if stages.outgoing(stage) else [] if workload.loss_fn else [self.output]
        self.gradients = [
            [torch.randn_like(tensor) for tensor in tensors_of(value) if tensor.requires_grad] for value in roots
        ]
        self.run(lambda: None)

    @property
    def wants_input_gradients(self) -> bool:
        """Whether the backward computes gradients of what the stage received, or of what earlier chunks passed on."""
        earlier = () if self._earlier is None else self._earlier.passed_on
        return any(tensor.requires_grad for values in (tensors_of(self.received), *earlier) for tensor in values)

    @property
    def sizes(self) -> tuple[list[int], list[int]]:
        """Bytes of values and of their gradients, by outgoing edge."""
        values = [*map(tensors_of, self.values)]
        needing_gradients = [[tensor for tensor in tensors if tensor.requires_grad] for tensors in values]
        return [*map(num_bytes, values)], [*map(num_bytes, needing_gradients)]

    def run(self, mark: Callable[[], None]) -> None:
        """Run four parts: F, R, B or I, and W; parts that the stage does not have are empty."""
        mark()
        kept = self._first_forward(self._leaves())
        mark()
        if isinstance(kept, Again):
            kept = self.forward(kept.received, kept.buffers)[2]
        mark()
        work = self.backward(kept, self.gradients)[1]
        del kept
        mark()
        if work is not None:
            work.run()
        mark()

    def run_again(self, mark: Callable[[], None], buffers: dict[str, torch.Tensor]) -> None:
        """Run one part: R, a forward that uses `buffers` and does not change the module's own."""
        leaves = self._leaves()
        mark()
        self.forward(leaves, buffers)
        mark()

    def forward(
        self, received: list[Any], buffers: dict[str, torch.Tensor] | None = None, *, split: bool | None = None
    ) -> tuple[Any, list[Any], Kept]:
        """Run the forward: the output, the values that leave the stage, and what is kept for the backward."""
        split = self.split if split is None else split
        workload = self.workload
        chunk = None if self._earlier is None else Chunk(self._earlier.start, self._earlier.passed_on)
        with collect_losses() as added:
            output, values, kept = self._forwards[split](received, workload.batch, buffers=buffers, chunk=chunk)
        if chunk is not None:
            leaves = hand_over(chunk.passed_on())
            for leaf in leaves if workload.has_later else ():
                leaf.grad = torch.zeros_like(leaf) if leaf.requires_grad else None  # as backwards of later chunks do
            pass_on(kept, chunk.passed_on(), leaves)
        for loss in added.losses:
            keep_loss(kept, loss.value, 1.0)
        if not values and workload.loss_fn is not None:
            keep_loss(kept, loss_of(workload.loss_fn, output, workload.target, self.device)[0], 1.0)
        elif not values:  # without a loss, the backward starts from the last stage's output
            kept.outputs = [gradient_edges(output, f"stage {self.stage}")]
        return output, values, kept

    def backward(
        self, kept: Kept, gradients: Sequence[Gradients]
    ) -> tuple[list[list[torch.Tensor | None]], WeightWork | None]:
        """Run the backward: the gradients of the received values, and the work left for W."""
        with without_autocast(ambient_autocast()), collect_losses():
            return backward_inputs(kept, gradients) if self.split else (backward(kept, gradients), None)

    def _first_forward(self, received: list[Any]) -> Kept | Again:
        if not self.recompute:
            return self.forward(received)[2]
        stages, stage = self.workload.stages, self.stage
        inputs = stages.pick_inputs(stage, self.workload.batch)
        with without_activations(stages[stage], received, inputs, f"stage {stage}") as again:
            self.forward(received)
        return again

    def _leaves(self) -> list[Any]:
        return [hand_over(value) for value in self.received]

    def bytes(self, from_here: list[bool]) -> StageBytes:
        """The bytes that the stage holds, without those from before, such as parameters and the batch.

        `from_here`: for each incoming edge, whether its value is passed in memory, not by a message.
        """
        copies = [copier(contiguous=not here) for here in from_here]
        watch = StorageWatch()
        live = watch.live
        with watch, torch.autograd.set_multithreading_enabled(False):  # a thread of a device frees its tensors late
            received = [over_tensors(copy, value) for copy, value in zip(copies, self.received, strict=True)]
            del copies
            live.see(received)
            kept = self._first_forward(received)
            del received
            checkpoint = live.num_bytes() if isinstance(kept, Again) else 0
            if isinstance(kept, Again):
                kept = self.forward(kept.received, kept.buffers)[2]
            held = live.num_bytes()
            if not self.split:
                return StageBytes(held, 0, checkpoint)
            gradients = [[*map(copier(contiguous=True), arriving)] for arriving in self.gradients]
            work = self.backward(kept, gradients)[1]
            del kept, gradients
            waiting = live.num_bytes()
            del work
        return StageBytes(held, waiting, checkpoint)


def on_device_of(stage: int, workload: Workload) -> tuple[Workload, Callable[[Any], Any]]:
    """The workload with the batch where the stage is, and what moves a value there, as each rank has it in a run.

    A stage without tensors takes values where they are.
    """
    devices = [tensor.device for tensor in workload.stages[stage].state_dict().values()]
    if not devices:
        return workload, lambda value: value

    def move(value: Any) -> Any:
        return over_tensors(lambda tensor: tensor.to(devices[0]), value)

    return workload._replace(batch=move(workload.batch), target=move(workload.target)), move


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors in a value that crosses a boundary."""
    return flatten(value, "a stage")[0]


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors' elements, as a message carries them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def static_bytes(module: torch.nn.Module) -> int:
    """Bytes of parameters, their gradients and buffers, without an optimizer's state."""
    return num_bytes(parameter for parameter in module.parameters() if parameter.requires_grad) + state_bytes(module)


def state_bytes(module: torch.nn.Module) -> int:
    """Bytes of parameters and buffers, which a checkpoint holds besides an optimizer's state."""
    return num_bytes([*module.parameters(), *module.buffers()])


@contextmanager
def one_thread(stages: Stages) -> Iterator[None]:
    """Inside, the CPU computes with one thread, as in a run; random states are afterwards as they were."""
    num_threads = torch.get_num_threads()
    with random_state_kept(torch.nn.ModuleList(stages.modules)):
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)


# --- the optimizer ----------------------------------------------------------------------------------------------------


class OptimizerCosts(NamedTuple):
    """`bytes_of`: the state's bytes per parameter of the module; `us`: the time of a step."""

    bytes_of: list[int]
    us: float


def optimizer_costs(
    module: torch.nn.Module, make: MakeOptimizer | None, measure: Callable[[Run], Laps]
) -> OptimizerCosts:
    """Costs of an optimizer of the module's trainable parameters, which are changed; zeros without an optimizer.

    `measure` measures the time of a step.
    """
    parameters = [*module.parameters()]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if make is None or not trained:
        return OptimizerCosts([0] * len(parameters), 0.0)
    optimizer = make(trained)
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # the first step makes its state

    def run(mark: Callable[[], None]) -> None:
        mark()
        optimizer.step()
        mark()

    state: dict[Any, Any] = optimizer.state
    sizes = [{address_of(s): s.nbytes() for s in storages(state.get(parameter, {}))} for parameter in parameters]
    return OptimizerCosts([sum(by_address.values()) for by_address in sizes], measure(run).us[0])
