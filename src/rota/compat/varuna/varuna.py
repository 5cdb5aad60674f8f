"""Varuna: a model with CutPoints as one of its stages in this process, trained with the others by Varuna's schedule.

"0,2;1,3;"        stage 0     stage 1
    replica 0     rank 0  ──▶ rank 1        each replica steps on its own part of the batch
    replica 1     rank 2  ──▶ rank 3
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rota.compat.varuna.cutting import cut, cuts_by, dry_run, plan_of
from rota.compat.varuna.inputs import (
    GetBatch,
    MicroBatches,
    autocast,
    num_rows,
    sample_of,
    stages_to_ranks,
    to_micro_batches,
)
from rota.core.costs import Costs
from rota.core.errors import PipelineError
from rota.models import CutPoint as CutPoint
from rota.runtime import Pipeline, materialize
from rota.runtime.checkpoints import Checkpoints
from rota.runtime.process_group import join


@final
class Varuna(nn.Module):
    """This process's stage of `model`. Collective: every process makes one.

    Make the optimizer afterwards, of `parameters()`, and pass it to `set_optimizer`. The weights of other stages are
    freed, in `model` too.

    Args:
        model: A model with CutPoints whose forward returns the mean loss.
        stage_to_rank_map: For each stage its ranks, one per replica, such as "0,2;1,3;".
        get_batch_fn: Returns sample inputs as a dictionary, given their number; or such a dictionary.
        batch_size: Examples of a step, over all replicas.
        chunk_size: Examples of a micro-batch.
        fp16: Whether forwards compute in float16, with a loss scale.
        local_rank, device, from_cache: Ignored: Varuna on Rota runs on CPUs.
        shared_weights: Pairs of names of parameters that become one weight, with the first one's value.
        costs: Costs of all pieces between CutPoints, as `Profiler` finds them: the cut makes the slowest stage as fast
            as possible. None: an even cut.

    Raises:
        PipelineError: The map, the sizes and the processes do not fit together.
        SplitError: The model cannot be cut in this way.
    """

    def __init__(
        self,
        model: nn.Module,
        stage_to_rank_map: str,
        get_batch_fn: GetBatch | Mapping[str, Any],
        batch_size: int,
        chunk_size: int,
        fp16: bool = False,
        local_rank: int = -1,  # noqa: ARG002
        device: int = -1,  # noqa: ARG002
        shared_weights: Collection[tuple[str, str]] | None = None,
        from_cache: bool = True,  # noqa: ARG002
        *,
        costs: Costs | None = None,
    ) -> None:
        super().__init__()
        join()
        ranks_by_stage = stages_to_ranks(stage_to_rank_map, dist.get_world_size())
        self.num_stages, self.num_replicas = len(ranks_by_stage), len(ranks_by_stage[0])
        self.stage = next(stage for stage, ranks in enumerate(ranks_by_stage) if dist.get_rank() in ranks)
        self.batch_size, self.chunk_size = batch_size, chunk_size
        num_examples = self._num_examples(batch_size)
        self._fp16 = fp16
        sample = sample_of(get_batch_fn, chunk_size)
        with autocast(self._fp16):
            num_cut_points = dry_run(model, sample, num_rows(sample))
            cuts = None if costs is None else cuts_by(costs, self.num_stages, num_cut_points)
            self.stages = cut(model, self.num_stages, shared_weights or (), cuts, sample)
        materialize(self.stages, [self.stage])
        #: This process's stage; its parameters have the names that they have in the whole model.
        self.model = self.stages[self.stage]
        ranks = torch.tensor(ranks_by_stage).T.contiguous()
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "pp"))
        self._checkpoints: dict[tuple[Path, bool], Checkpoints] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._optimizer_set = False
        self._scaler: torch.amp.GradScaler | None = None
        self._fixed_scale: float | None = None
        self._least_scale = 0.0
        #: Number of steps, including those before a checkpoint was loaded.
        self.iteration = 0
        plan = plan_of(self.num_stages, math.ceil(num_examples / chunk_size))
        #: The `rota.Pipeline` that runs the steps, with its plan and its timeline.
        self.pipeline = Pipeline(self.stages, plan, _loss_of, mesh=mesh)  # makes the ranks' weights equal

    def _num_examples(self, batch_size: int) -> int:
        if batch_size < 1 or self.chunk_size < 1 or batch_size % self.num_replicas:
            raise PipelineError(
                f"batch_size is {batch_size}, chunk_size {self.chunk_size}; give at least 1 each, a batch_size "
                f"that divides by the {self.num_replicas} replicas"
            )
        return batch_size // self.num_replicas

    # --- steps ----------------------------------------------------------------------------------------------------

    def step(self, inputs: Mapping[str, Any], clip_grad_max_norm: float | None = None) -> tuple[float, bool, float]:
        """Run the forwards and backwards of one batch. Collective; the caller steps the optimizer.

        Gradients are added to `.grad`, as means over all examples. After an overflow they are removed, so that the
        optimizer's step does nothing.

        Args:
            inputs: This replica's inputs, the same on all its stages, by the names of the forward's arguments. Tensors
                are split along dim 0; None, numbers and tensors without dims go to every micro-batch.
            clip_grad_max_norm: The norm to which all gradients together are clipped; None: no clipping.

        Returns:
            (mean loss, whether fp16 overflowed, norm of all gradients before clipping), the same on every rank.
        """
        batch = self._micro_batches(inputs, self.batch_size)
        scaler = self._scaler
        if self._fp16 and scaler is None:
            raise PipelineError("with fp16, call set_optimizer before step (None on a rank without parameters)")
        for parameter in self.parameters() if scaler is not None else ():
            if parameter.grad is not None:  # this step's gradients, which are scaled, are added to it
                parameter.grad.mul_(self.get_loss_scale())
        with autocast(self._fp16):
            loss = self.pipeline.step(*batch, plan=plan_of(self.num_stages, len(batch.inputs)), scaler=scaler)
        if scaler is not None and self._optimizer is not None:
            scaler.unscale_(self._optimizer)
        norm = float(self.pipeline.clip_grad_norm_(math.inf if clip_grad_max_norm is None else clip_grad_max_norm))
        self.iteration += 1
        return loss, self._has_overflowed(norm), norm

    def _has_overflowed(self, norm: float) -> bool:
        """Whether fp16 overflowed; if so, remove the gradients, and lower the loss scale."""
        if self._scaler is None:
            return False
        overflow = not math.isfinite(norm)
        for parameter in self.parameters() if overflow else ():
            parameter.grad = None
        self._scaler.update(self._fixed_scale)
        if self._scaler.get_scale() < self._least_scale:
            self._scaler.update(self._least_scale)
        return overflow

    def evaluate(self, inputs: Mapping[str, Any], batch_size: int | None = None) -> float:
        """The mean loss on every rank, in eval() and without gradients, of a batch of any size. Collective."""
        batch = self._micro_batches(inputs, self.batch_size if batch_size is None else batch_size)
        with autocast(self._fp16):
            return self.pipeline.evaluate(*batch, plan=plan_of(self.num_stages, len(batch.inputs)))

    def _micro_batches(self, inputs: Mapping[str, Any], batch_size: int) -> MicroBatches:
        batch = to_micro_batches(inputs, self._num_examples(batch_size), self.chunk_size)
        if unknown := [name for name in inputs if name not in self.stages.input_names]:
            raise PipelineError(
                f"inputs has {unknown[0]!r}, which the model's forward does not take; it takes "
                f"{', '.join(map(repr, self.stages.input_names))}"
            )
        return batch

    # --- optimizer and checkpoints --------------------------------------------------------------------------------

    def set_optimizer(
        self,
        optimizer: torch.optim.Optimizer | None,
        loss_scale: float | Literal["dynamic"] = "dynamic",
        init_loss_scale: float = 2.0**20,
        min_loss_scale: float = 1.0,
    ) -> None:
        """Set the optimizer of this rank's parameters (None if it has none), and the loss scale of fp16."""
        if isinstance(loss_scale, str) and loss_scale != "dynamic":
            raise PipelineError(f"loss_scale is {loss_scale!r}; give a number or 'dynamic'")
        if self._fp16:
            self._fixed_scale = None if isinstance(loss_scale, str) else float(loss_scale)
            self._least_scale = min_loss_scale
            self._scaler = torch.amp.GradScaler("cpu", init_scale=self._fixed_scale or init_loss_scale)
        self._optimizer, self._optimizer_set = optimizer, True
        for checkpoints in self._checkpoints.values():
            checkpoints.close()
        self._checkpoints.clear()

    def get_loss_scale(self) -> float:
        """1 without fp16."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def checkpoint(
        self,
        global_store: str | Path,
        step: int | None = None,
        tempdir: str | None = None,
        shard: bool = False,  # noqa: ARG002
        on_demand: bool = False,  # noqa: ARG002
    ) -> None:
        """Save weights, optimizer and loss scale under `global_store`, a folder that all ranks see. Collective.

        `step` is by default the number of steps so far. With any `tempdir`, files are written in the background. Each
        weight is written once, whatever `shard` is.
        """
        extra = {} if self._scaler is None else {"loss_scaler": self._scaler.state_dict()}
        self._store(global_store, tempdir is not None).save(self.iteration if step is None else step, **extra)

    def load_checkpoint(self, global_store: str | Path, iteration: int, check_complete: bool = True) -> None:  # noqa: ARG002
        """Set all that `checkpoint` saved as step `iteration`, with any number of stages and replicas. Collective.

        An incomplete checkpoint is never loaded. Raises PipelineError.
        """
        loaded = self._store(global_store, False).load(iteration)
        assert loaded is not None  # load reports a step that does not exist
        if self._scaler is not None and "loss_scaler" in loaded.extra:
            self._scaler.load_state_dict(loaded.extra["loss_scaler"])
        self.iteration = iteration

    def _store(self, folder: str | Path, asynchronous: bool) -> Checkpoints:
        if not self._optimizer_set:
            raise PipelineError(
                "checkpoints need the optimizer: call set_optimizer first (None on a rank without weights)"
            )
        key = Path(folder), asynchronous
        for checkpoints in self._checkpoints.values():
            checkpoints.wait()
        if key not in self._checkpoints:
            self._checkpoints[key] = Checkpoints(
                folder, self.pipeline, self._optimizer, keep=None, asynchronous=asynchronous
            )
        return self._checkpoints[key]

    def close(self) -> None:
        """End the pipeline's threads, and wait for checkpoints that are being written."""
        self.pipeline.close()
        self._checkpoints.clear()

    # --- as a module ----------------------------------------------------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this process's stage, by their names in the whole model."""
        return self.model.named_parameters(prefix, recurse, remove_duplicate)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Do nothing: stages are on the CPU. Raises PipelineError for another device, or a dtype."""
        values = [*args, *kwargs.values()]
        if len(values) != 1 or not isinstance(values[0], str | torch.device) or torch.device(values[0]).type != "cpu":
            raise PipelineError(f"stages run on the CPU, in the dtypes of the model; leave to({values}) out")
        return self


def _loss_of(output: Any, sizes: torch.Tensor) -> Any:  # noqa: ARG001
    """Return the loss that the model computed; the sizes serve only the micro-batches' shares of the mean."""
    return output
