"""TorchDistPackage's pipeline parallelism on Rota: process topology, cuts, `forward_backward`, gradient clipping."""

from rota.compat.torchdistpackage.parallel.clip_grad_parallel import clip_grad_norm_
from rota.compat.torchdistpackage.parallel.pipeline_helper import flatten_model, partition_balanced, partition_uniform
from rota.compat.torchdistpackage.parallel.pipeline_sched import forward_backward, forward_eval
from rota.compat.torchdistpackage.topology import DDP, is_using_pp, tpc

__all__ = [
    "DDP",
    "clip_grad_norm_",
    "flatten_model",
    "forward_backward",
    "forward_eval",
    "is_using_pp",
    "partition_balanced",
    "partition_uniform",
    "tpc",
]
