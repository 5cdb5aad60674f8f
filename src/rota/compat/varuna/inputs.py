"""Inputs of Varuna: the map of stages to ranks, sample batches, and a step's inputs, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from rota.core.errors import PipelineError

GetBatch = Callable[[int], Mapping[str, Any]]


class MicroBatches(NamedTuple):
    """`sizes[m]` has as many rows as micro-batch m has examples, which gives its share of the mean loss."""

    inputs: list[dict[str, Any]]
    sizes: list[torch.Tensor]


def stages_to_ranks(stage_to_rank_map: str, num_processes: int) -> list[list[int]]:
    """`"0,2;1,3;"` as [[0, 2], [1, 3]]: for each stage its ranks, replica by replica. Raises PipelineError."""
    try:
        stages = [[*map(int, ranks.split(","))] for ranks in stage_to_rank_map.strip().rstrip(";").split(";")]
    except (AttributeError, ValueError):
        raise PipelineError(
            f"stage_to_rank_map is {stage_to_rank_map!r}; give ranks for each stage, such as '0,2;1,3;'"
        ) from None
    if len({*map(len, stages)}) > 1:
        sizes = ", ".join(str(len(ranks)) for ranks in stages)
        raise PipelineError(f"stage_to_rank_map has {sizes} ranks for its stages; give as many replicas to each")
    if sorted(rank for ranks in stages for rank in ranks) != [*range(num_processes)]:
        raise PipelineError(
            f"stage_to_rank_map is {stage_to_rank_map!r}, but there are {num_processes} processes; name each once"
        )
    return stages


def sample_of(get_batch_fn: GetBatch | Mapping[str, Any], size: int) -> dict[str, Any]:
    """`get_batch_fn(size)`, or the dictionary itself."""
    sample = get_batch_fn if isinstance(get_batch_fn, Mapping) else get_batch_fn(size)
    if not isinstance(sample, Mapping):
        raise PipelineError(f"get_batch_fn returned a {type(sample).__name__}; return a dictionary of inputs by name")
    return dict(sample)


def num_rows(inputs: Mapping[str, Any]) -> int:
    """The number of examples: dim 0 of the first tensor that has one."""
    rows = next((value.shape[0] for value in inputs.values() if _has_rows(value)), None)
    if not rows:
        raise PipelineError(f"the inputs {', '.join(map(repr, inputs)) or '{}'} hold no tensor with examples; add one")
    return int(rows)


def to_micro_batches(inputs: Mapping[str, Any], num_examples: int, chunk_size: int) -> MicroBatches:
    """The inputs of each micro-batch: tensors split along dim 0, the last part maybe shorter; the rest goes to all."""
    if not isinstance(inputs, Mapping):
        raise PipelineError(f"inputs is a {type(inputs).__name__}; give a dictionary of the forward's inputs by name")
    for name, value in inputs.items():
        if _has_rows(value) and len(value) != num_examples:
            raise PipelineError(
                f"inputs[{name!r}] has {len(value)} rows, but a replica's part of the batch has {num_examples}; give "
                f"as many, expand what is equal for all examples, or set another batch_size"
            )
    num_rows(inputs)  # raises if there is no tensor with examples
    starts = range(0, num_examples, chunk_size)
    parts = [
        {name: value[i : i + chunk_size] if _has_rows(value) else value for name, value in inputs.items()}
        for i in starts
    ]
    return MicroBatches(parts, [torch.zeros(min(chunk_size, num_examples - i)) for i in starts])


def autocast(fp16: bool) -> AbstractContextManager[object]:
    """A context in which forwards compute in float16 if `fp16`; else as the surrounding code says."""
    return torch.autocast("cpu", torch.float16) if fp16 else nullcontext()


def _has_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0
