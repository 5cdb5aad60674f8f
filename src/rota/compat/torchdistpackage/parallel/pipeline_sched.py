"""`forward_backward`: a step of a pipeline whose stages are functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from rota.compat.torchdistpackage.stage import Backward, Forward, FunctionStage
from rota.compat.torchdistpackage.topology import tpc
from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.errors import PipelineError
from rota.core.placing import place
from rota.models import Stages
from rota.runtime import Pipeline
from rota.runtime.device.protocol import HostDevice
from rota.runtime.reducing.replicas import GradientAllReduce
from rota.schedules import forward_only as forwards_alone, one_f_one_b

#: This process's pipelines and stages, until the process groups are set up again.
_pipelines: dict[tuple[int, bool, bool], tuple[Pipeline, FunctionStage]] = {}


def forward_backward(
    optimizer: torch.optim.Optimizer | None,
    fwd_fn: Forward,
    bwd_fn: Backward | None,
    inputs: torch.Tensor | list[Any] | tuple[Any, ...] | None,
    num_microbatches: int = 1,
    forward_only: bool = False,
    dtype: torch.dtype = torch.bfloat16,  # noqa: ARG001
    scatter_gather_tensors: bool = False,
) -> Any:
    """Run one step of 1F1B on all stages. Collective.

    Args:
        optimizer: Its gradients are cleared first; its `step` is not called.
        fwd_fn: This stage's forward. It gets what the previous stage returned (one tensor or several), then this
            stage's own inputs: a single value as it is, several values as a list. On the last stage it returns the
            loss; gradients are those of the sum over micro-batches.
        bwd_fn: Called with (output, its gradient) instead of autograd's backward; on the last stage the gradient is
            None. None: autograd's backward.
        inputs: This stage's own inputs, each split along dim 0 into `num_microbatches`.
        num_microbatches: The number of micro-batches.
        forward_only: Whether to compute no gradients; the last stage may then return anything.
        dtype: Not used: tensors of any dtype are sent as they are.
        scatter_gather_tensors: Whether to send tensors in slices over the "tensor" group.

    Returns:
        This stage's output for its last micro-batch, detached.

    Raises:
        PipelineError: If `inputs` do not divide, or are missing on the first stage.
    """
    microbatches = _divided(inputs, num_microbatches)
    if optimizer is not None and not forward_only:
        optimizer.zero_grad()
    pipeline, stage = _pipeline(num_microbatches, forward_only, scatter_gather_tensors)
    stage.fwd_fn, stage.bwd_fn = fwd_fn, bwd_fn
    with _reduced_once(active=not forward_only):
        pipeline.step([(own_inputs,) for own_inputs in microbatches])
    output, stage.output = stage.output, None
    return output


def forward_eval(fwd_fn: Forward, inputs: Any, dtype: torch.dtype = torch.bfloat16, **kwargs: Any) -> Any:
    """Run a whole batch through all stages without gradients, and return this stage's output. Collective."""
    return forward_backward(None, fwd_fn, None, inputs, 1, forward_only=True, dtype=dtype, **kwargs)


def _divided(inputs: Any, num_microbatches: int) -> list[list[Any]]:
    values = [] if inputs is None else [inputs] if isinstance(inputs, torch.Tensor) else [*inputs]
    if not values and tpc.is_first_in_group("pipe"):
        raise PipelineError("inputs is empty on the first stage, which has no other input; pass the batch there")
    for i, value in enumerate(values):
        shape = [*value.shape] if isinstance(value, torch.Tensor) else type(value).__name__
        if not isinstance(shape, list) or not shape or shape[0] % num_microbatches or not shape[0]:
            raise PipelineError(
                f"inputs[{i}] is of shape {shape}, which does not divide along dim 0 into {num_microbatches} "
                f"micro-batches; give tensors with a multiple of {num_microbatches} rows, or another num_microbatches"
            )
    columns = [value.chunk(num_microbatches) for value in values]
    return [[column[m] for column in columns] for m in range(num_microbatches)]


def _pipeline(num_microbatches: int, forward_only: bool, in_slices: bool) -> tuple[Pipeline, FunctionStage]:
    key = num_microbatches, forward_only, in_slices
    if key not in _pipelines:
        size = tpc.get_group_size("pipe")
        group = tpc.get_group("tensor") if in_slices and tpc.is_mode_inited("tensor") else None
        stages = [FunctionStage(is_last=stage == size - 1, group=group) for stage in range(size)]
        placement = place(Costs.uniform(size), Cluster.uniform(size))
        plan = (
            forwards_alone(placement.forward_only(), num_microbatches)
            if forward_only
            else one_f_one_b(placement, num_microbatches)
        )
        loss_fn = None if forward_only else _computed_by_fwd_fn
        pipeline = Pipeline(
            Stages(stages, inputs=[0] * size),
            plan,
            loss_fn,
            mesh=tpc.mesh,
            dynamic_shapes=True,  # a function may return tensors of another shape each time
            check_data="never",  # each stage has inputs of its own, which need not be those of others
        )
        _pipelines[key] = pipeline, stages[pipeline.rank]
        tpc.before_close.callback(pipeline.close)
        tpc.before_close.callback(_pipelines.pop, key)
    return _pipelines[key]


def _computed_by_fwd_fn(output: Any) -> Any:
    return output


@contextmanager
def _reduced_once(active: bool) -> Iterator[None]:
    """Let the DDP modules that run inside the `with` block average their gradients once, at the end.

    DDP alone would average them after the first of several backwards.
    """
    held_back: list[DistributedDataParallel] = []

    def hold_back(module: nn.Module, _: Any) -> None:
        if isinstance(module, DistributedDataParallel) and module.require_backward_grad_sync:
            module.require_backward_grad_sync = False
            held_back.append(module)

    hook = register_module_forward_pre_hook(hold_back) if active else None
    try:
        yield
    finally:
        for module in held_back:
            module.require_backward_grad_sync = True
        if hook is not None:
            hook.remove()
    for module in held_back:
        group: dist.ProcessGroup = module.process_group
        average = GradientAllReduce([*module.parameters()], group, HostDevice(), group.size())
        average.start()
        average.finish()
