"""The whole model's weights on the first process: to save them in another format, or to generate with them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rota.core.errors import PipelineError
from rota.runtime.checkpoints.names import Weights
from rota.runtime.faults.watchdog import PATIENT
from rota.runtime.pipeline import Pipeline
from rota.runtime.reducing.wrapped_stages import is_sharded
from rota.runtime.transport import collective, receive_value, send_value


def gather_weights(pipeline: Pipeline) -> dict[str, torch.Tensor]:
    """Copies of the whole model's weights and buffers, on the CPU of the first process. Collective.

    Args:
        pipeline: Its stages have them, under the names of the unsplit model where `split` made them.

    Returns:
        What the unsplit model's `load_state_dict` takes; a tied weight has all its names. Empty on all other processes.

    Raises:
        PipelineError: Weights are in TP shards.
    """
    weights = Weights(pipeline)
    if sharded := [weight.names[0] for weight in weights.all if weight.num_tp_shards > 1]:
        raise PipelineError(
            f"{sharded[0]} is in TP shards, and Rota does not know how its module joins them; join them in your script"
        )
    processes, mine = pipeline._processes, dist.get_rank()
    here = {weight.names[0]: weight.tensor.detach() for weight, _ in weights.local()}
    gathered: dict[str, torch.Tensor] = {}
    with pipeline.watching("the other ranks to gather the weights", PATIENT), collective("gathering the weights"):
        for weight in weights.all:
            name = weight.names[0]
            value = here.get(name)
            if value is not None and is_sharded(value):
                value = value.full_tensor()  # type: ignore[attr-defined]  # of all replicas together
            owner = processes.pipelines[0][pipeline.plan.placement.ranks_of(weight.stages[0])[0]]
            if mine == owner and not processes.is_first:
                send_value(value, name, processes.pipelines[0][0], processes.everyone)
            elif processes.is_first:
                if mine != owner:
                    value = receive_value(owner, processes.everyone, torch.device("cpu"))
                assert value is not None
                gathered |= dict.fromkeys(weight.names, value.to("cpu", copy=True))
    return gathered
