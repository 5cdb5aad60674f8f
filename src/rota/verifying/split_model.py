"""The split model as the processes of a Pipeline, of which the first gets all values; stages alone make one, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.errors import PipelineError
from rota.core.placing import place
from rota.core.plan import Plan
from rota.models import Stages
from rota.runtime import Pipeline
from rota.runtime.device.local import group_backend
from rota.runtime.json_messages import all_gather_json
from rota.runtime.losses import LossFn
from rota.runtime.messages import tensors_in
from rota.runtime.process_group import leave
from rota.runtime.reducing.sharded_stages import is_sharded
from rota.runtime.transport import receive_value, send_value
from rota.schedules import gpipe
from rota.verifying.apart import apart
from rota.verifying.matching import Place
from rota.verifying.unsplit import Batch

_NO_LIMIT_S = 1e6  # a process alone waits for nobody


@contextmanager
def pipeline_of(stages: Stages, loss_fn: LossFn, num_microbatches: int) -> Iterator[Pipeline]:
    """All stages as a Pipeline in this process, which is in no process group, or alone in one."""
    is_alone = not dist.is_initialized()
    if is_alone:
        dist.init_process_group(group_backend(), store=HashStore(), rank=0, world_size=1)
    elif dist.get_world_size() > 1:
        raise PipelineError(
            f"this is one of {dist.get_world_size()} processes, and stages are verified in one; give verify a Pipeline"
        )
    try:
        edges, ranks = [edge[:2] for edge in stages.edges], [0] * len(stages)
        plan = gpipe(place(Costs.uniform(len(stages)), Cluster.uniform(1), ranks, edges), num_microbatches)
        with Pipeline(stages, plan, loss_fn, timeout_s=_NO_LIMIT_S, allow_nonfinite_loss=True) as pipeline:
            yield pipeline
    finally:
        if is_alone:
            leave([dist.group.WORLD])


@final
class SplitModel:
    """All processes call the same methods in the same order. `batch`: what this process gives to `step`."""

    def __init__(self, pipeline: Pipeline, batch: Batch, loss_fn: LossFn) -> None:
        self.pipeline, self.loss_fn, self._batch = pipeline, loss_fn, batch
        #: Of each sample its micro-batches: one, or several chunks.
        self._samples = _samples_of(pipeline.plan)
        self.num_microbatches = len(self._samples)
        #: Where the first process runs the unsplit model.
        self.device = pipeline.device
        assert dist.group.WORLD is not None
        self._here, self._everyone = dist.get_rank(), dist.group.WORLD
        self.is_first = self._here == 0
        placement = pipeline.plan.placement
        shards = any(is_sharded(p) for stage in pipeline.local_stages.values() for p in stage.parameters())
        everyone = all_gather_json([pipeline.replica, pipeline.rank, shards])
        self.is_sharded = any(sharded for _, _, sharded in everyone)
        if len({(replica, rank) for replica, rank, _ in everyone}) < len(everyone) or any(
            len(placement.ranks_of(stage)) > 1 for stage in placement.stages
        ):
            raise PipelineError(
                "verify cannot put together weights that tensor parallelism divides; verify the same stages without it"
            )
        self._process_of = {(replica, rank): process for process, (replica, rank, _) in enumerate(everyone)}

    @contextmanager
    def apart(self, dtype: torch.dtype | None) -> Iterator[None]:
        """See `rota.verifying.apart.apart`."""
        with apart(self.pipeline.local_stages.values(), dtype), self.pipeline.trial():
            yield

    def batches(self) -> list[Batch]:
        """The inputs and targets that the ranks of each replica have. Empty on all but the first process."""
        names = all_gather_json([_names(part) for part in self._batch])
        batches = []
        for replica in range(self.pipeline.num_replicas):
            processes = [process for (number, _), process in self._process_of.items() if number == replica]
            batches.append(Batch(*(self._brought(part, names, processes) for part in range(2))))
        return batches if self.is_first else []

    def _brought(self, part: int, names_of: list[list[list[str] | None]], processes: list[int]) -> Any:
        """The inputs (part 0) or targets (1) of the first process with any; if dicts, also the keys that others add."""
        made: Any = None
        known: set[str] | None = None  # by which all processes decide alike
        for process in processes:
            names = names_of[process][part]
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
        """Run the stages: the mean loss, and the tensors of each micro-batch's output."""
        pipeline = self.pipeline
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
                own = {m: [*tensors_in(pipeline.outputs[m])] for m in numbers if m in pipeline.outputs}
                by_microbatch |= self._bring(own, process)
            samples = (sample for sample in self._samples if sample[0] in by_microbatch)
            outputs += [_whole([by_microbatch[m] for m in sample]) for sample in samples]
        return loss, outputs

    def tensors(self, places: Iterable[Place], of_gradient: bool) -> Iterator[torch.Tensor | None]:
        """Values or gradients of parameters and buffers, sent one by one: the first process holds one at a time."""
        placement = self.pipeline.plan.placement
        for stage, name in places:
            tensor: Any = None
            if stage in self.pipeline.local_stages:
                owner, _, last = name.rpartition(".")
                tensor = getattr(self.pipeline.local_stages[stage].get_submodule(owner), last)
                tensor = tensor.grad if of_gradient else tensor.detach()
                if tensor is not None and is_sharded(tensor):
                    tensor = tensor.full_tensor()  # of all replicas together
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


def _names(value: Any) -> list[str] | None:
    if value is None:
        return None
    return [*value] if isinstance(value, dict) else []
