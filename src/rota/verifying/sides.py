"""What runs the stages: this process alone, or the processes of a Pipeline; and what they send the first process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar, final

import torch
import torch.distributed as dist
from torch import nn

from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.errors import PipelineError
from rota.core.placing import place
from rota.core.plan import Plan
from rota.core.programs.actions import ValueKey
from rota.models import Stages
from rota.runtime import Pipeline
from rota.runtime.compute import Compute
from rota.runtime.device.choosing import placed_on
from rota.runtime.device.protocol import HostDevice
from rota.runtime.execution import Execution, ThisRank
from rota.runtime.json_messages import all_gather_json, broadcast_json
from rota.runtime.losses import LossFn, needs_target
from rota.runtime.messages import tensors_in
from rota.runtime.microbatch_inputs import MicrobatchInputs
from rota.runtime.process_group import on_first
from rota.runtime.recorder import Record
from rota.runtime.reducing.loss_counts import LossCounts
from rota.runtime.reducing.sharded_stages import is_sharded
from rota.runtime.step_losses import loss_of_parts
from rota.runtime.transport import GradientFlags, Transport, receive_value, send_value
from rota.schedules import gpipe
from rota.verifying.apart import apart
from rota.verifying.matching import Place
from rota.verifying.unsplit import GivenBatch, plain

T = TypeVar("T")
_SEED = 0


class Side(Protocol):
    """The split model. All processes call the same methods in the same order; the first one gets the results."""

    stages: Stages
    loss_fn: LossFn
    num_microbatches: int
    is_first: bool
    is_sharded: bool
    #: Where the first process runs the unsplit model.
    device: torch.device

    def local_modules(self) -> Mapping[int, nn.Module]:
        """The stages of this process."""

    def apart(self, dtype: torch.dtype | None) -> AbstractContextManager[None]:
        """See `rota.verifying.apart.apart`."""

    def first(self, doing: str, act: Callable[[], T]) -> T:
        """Call `act` on the first process, and return its result, a JSON value, on all. Raises PipelineError on all."""

    def batches(self) -> list[GivenBatch]:
        """The batch of each replica."""

    def step(self, batch_dtype: torch.dtype | None) -> tuple[float, list[list[torch.Tensor]]]:
        """Run the stages: the mean loss, and the tensors of each micro-batch's output."""

    def tensors(self, places: Iterable[Place], of_gradient: bool) -> Iterator[torch.Tensor | None]:
        """Values or gradients of parameters and buffers."""

    def gather(self, value: T) -> list[T]:
        """The values of all processes, which are JSON values."""


def tensor_at(module: nn.Module, name: str, of_gradient: bool) -> torch.Tensor | None:
    """A parameter or buffer of a module by its name, or its gradient."""
    owner, _, last = name.rpartition(".")
    tensor: torch.Tensor = getattr(module.get_submodule(owner), last)
    return tensor.grad if of_gradient else tensor.detach()


# --- one process ------------------------------------------------------------------------------------------------------


@final
class _NoMessages:
    """The transport of a plan on one rank."""

    def __init__(self) -> None:
        self.flags = GradientFlags()

    def begin(self, *_: object) -> None:
        """Does nothing."""

    def take(self, key: ValueKey) -> Any:
        """Never called, as every value is made here."""
        raise AssertionError(key)

    def drain(self) -> None:
        """Does nothing, as nothing is sent."""


@final
class OneProcess:
    """Stages that run in this process, one after the other, with boundaries cut as the runtime does."""

    is_first, is_sharded = True, False

    def __init__(self, stages: Stages, batch: GivenBatch, loss_fn: LossFn, num_microbatches: int) -> None:
        self.stages, self.loss_fn, self.num_microbatches = stages, loss_fn, num_microbatches
        self._batch = batch
        self.device = placed_on(stages, range(len(stages))) or torch.device("cpu")
        edges, ranks = [edge[:2] for edge in stages.edges], [0] * len(stages)
        placement = place(Costs.uniform(len(stages)), Cluster.uniform(1), ranks, edges)
        self._plan = gpipe(placement, num_microbatches)
        self._inputs = MicrobatchInputs(stages, self._plan, 0, self.device, needs_target(loss_fn))
        self._inputs.take(*batch)  # refuses a batch that does not fit before it runs

    def local_modules(self) -> Mapping[int, nn.Module]:
        """All stages."""
        return dict(enumerate(self.stages.modules))

    def apart(self, dtype: torch.dtype | None) -> AbstractContextManager[None]:
        """See `Side`."""
        return apart(self.stages.modules, dtype)

    def first(self, doing: str, act: Callable[[], T]) -> T:  # noqa: ARG002 - nobody waits here
        """What `act` returns."""
        return act()

    def batches(self) -> list[GivenBatch]:
        """The one batch."""
        return [self._batch]

    def step(self, batch_dtype: torch.dtype | None) -> tuple[float, list[list[torch.Tensor]]]:
        """See `Side`."""
        for module in self.stages.modules:
            module.zero_grad(set_to_none=True)
        compute = Compute(self.stages, self._plan.placement, self.loss_fn)
        transport: Transport = _NoMessages()  # type: ignore[assignment]
        here = ThisRank(0, HostDevice(), transport, Record(0))
        execution = Execution(self.stages, self._plan, compute, here)
        batch = self._inputs.take(*self._batch.in_dtype(batch_dtype), keeps_outputs=True)
        counts = LossCounts(parameter for _, parameter in self.stages.named_parameters())
        batch = replace(batch, per_count=counts.begin(counts.flags(batch.targets)))
        execution.run(batch, _SEED, True, lambda: None)
        self._inputs.refuse_writes(batch)
        loss = loss_of_parts(compute.losses, compute.added, batch.shares)
        counts.finish(loss.count, sync=True)
        return loss.mean, [[*tensors_in(compute.outputs[m])] for m in sorted(compute.outputs)]

    def tensors(self, places: Iterable[Place], of_gradient: bool) -> Iterator[torch.Tensor | None]:
        """See `Side`."""
        return (tensor_at(self.stages[stage], name, of_gradient) for stage, name in places)

    def gather(self, value: T) -> list[T]:
        """The one value."""
        return [value]


# --- a pipeline -------------------------------------------------------------------------------------------------------


@final
class ManyProcesses:
    """The processes of a Pipeline, of which the first gets all values. `batch`: what this process gives to `step`."""

    def __init__(self, pipeline: Pipeline, batch: GivenBatch, loss_fn: LossFn) -> None:
        self._pipeline, self._batch = pipeline, GivenBatch(*map(plain, batch))
        self.stages, self.loss_fn = pipeline.stages, loss_fn
        #: Of each sample its micro-batches: one, or several chunks.
        self._samples = _samples_of(pipeline.plan)
        self.num_microbatches = len(self._samples)
        self.device = pipeline.device
        assert dist.group.WORLD is not None
        self._here, self._everyone = dist.get_rank(), dist.group.WORLD
        self.is_first = self._here == 0
        placement = pipeline.plan.placement
        everyone = self.gather([pipeline.replica, pipeline.rank, any(map(_shards, pipeline.local_stages.values()))])
        self.is_sharded = any(sharded for _, _, sharded in everyone)
        if len({(replica, rank) for replica, rank, _ in everyone}) < len(everyone) or any(
            len(placement.ranks_of(stage)) > 1 for stage in placement.stages
        ):
            raise PipelineError(
                "verify cannot put together weights that tensor parallelism divides; verify the same stages without it"
            )
        self._process_of = {(replica, rank): process for process, (replica, rank, _) in enumerate(everyone)}

    def local_modules(self) -> Mapping[int, nn.Module]:
        """The stages of this rank."""
        return self._pipeline.local_stages

    @contextmanager
    def apart(self, dtype: torch.dtype | None) -> Iterator[None]:
        """See `Side`."""
        with ExitStack() as stack:
            stack.enter_context(apart(self._pipeline.local_stages.values(), dtype))
            stack.enter_context(self._pipeline.trial())
            yield

    def first(self, doing: str, act: Callable[[], T]) -> T:
        """See `Side`."""
        return on_first(doing, act)

    def gather(self, value: T) -> list[T]:
        """See `Side`."""
        return all_gather_json(value)

    def batches(self) -> list[GivenBatch]:
        """The inputs and targets that the ranks of each replica have. Empty on all but the first process."""
        there = self.gather([_names(each) for each in self._batch])
        found = []
        for replica in range(self._pipeline.num_replicas):
            processes = [p for (of, _), p in self._process_of.items() if of == replica]
            found.append(GivenBatch(*(self._brought(part, there, processes) for part in range(2))))
        return found if self.is_first else []

    def _brought(self, part: int, there: list[list[list[str] | None]], processes: list[int]) -> Any:
        """The inputs (part 0) or targets (1) of the first process with any; if dicts, also the keys that others add."""
        made: Any = None
        known: set[str] | None = None  # by which all processes decide alike
        for process in processes:
            names = there[process][part]
            if names is None or (known is not None and not {*names} - known):
                continue
            value = self._bring(self._batch[part], process)
            if self.is_first:
                made = {**value, **(made or {})} if isinstance(value, dict) else value
            known = (known or set()) | {*names}
        return made

    def _bring(self, value: Any, process: int) -> Any:
        """Send the value of `process` to the first process; the others get their own value."""
        if process == self._here == 0:
            return value
        if self._here == process:
            send_value(value, f"process {process}", 0, self._everyone)
        elif self.is_first:
            return receive_value(process, self._everyone, self.device)
        return value

    def step(self, batch_dtype: torch.dtype | None) -> tuple[float, list[list[torch.Tensor]]]:
        """See `Side`."""
        pipeline = self._pipeline
        for parameter in pipeline.parameters():
            parameter.grad = None
        loss = pipeline.step(*self._batch.in_dtype(batch_dtype))
        outputs: list[list[torch.Tensor]] = []
        placement = pipeline.plan.placement
        for replica in range(pipeline.num_replicas):
            by_microbatch: dict[int, Any] = {}
            for sink in pipeline.stages.sinks:
                process = self._process_of[replica, placement.ranks_of(sink)[0]]
                numbers = placement.microbatches(sink, pipeline.plan.num_microbatches)
                mine = {m: [*tensors_in(pipeline.outputs[m])] for m in numbers if m in pipeline.outputs}
                by_microbatch |= self._bring(mine, process)
            outputs += [_whole([by_microbatch[m] for m in of]) for of in self._samples if of[0] in by_microbatch]
        return loss, outputs

    def tensors(self, places: Iterable[Place], of_gradient: bool) -> Iterator[torch.Tensor | None]:
        """See `Side`. Tensors are sent one after the other, so the first process holds one at a time."""
        placement = self._pipeline.plan.placement
        for stage, name in places:
            tensor = None
            if stage in self._pipeline.local_stages:
                tensor = tensor_at(self._pipeline.local_stages[stage], name, of_gradient)
                if tensor is not None and is_sharded(tensor):
                    tensor = tensor.full_tensor()  # type: ignore[attr-defined]  # of all replicas together
            yield self._bring(tensor, self._process_of[0, placement.ranks_of(stage)[0]])


def _samples_of(plan: Plan) -> list[list[int]]:
    """The micro-batches of each sample, in the order in which a batch is spread over the samples."""
    samples: dict[int, list[int]] = {}
    for m, sample in enumerate(plan.placement.sample_of or range(plan.num_microbatches)):
        samples.setdefault(sample, []).append(m)
    return [*samples.values()]


def _whole(chunks: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """The outputs of a sample, joined along its length; tensors without a length are those of the first chunk."""
    if len(chunks) == 1:
        return chunks[0]
    return [torch.cat(parts, 1) if parts[0].dim() > 1 else parts[0] for parts in zip(*chunks, strict=True)]


def _shards(module: nn.Module) -> bool:
    return any(map(is_sharded, module.parameters()))


def _names(value: Any) -> list[str] | None:
    if value is None:
        return None
    return [*value] if isinstance(value, dict) else []


def agreed(side: Side, value: T) -> T:
    """The first process's value, on all."""
    return value if isinstance(side, OneProcess) else broadcast_json(value)
