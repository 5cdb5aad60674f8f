"""A step's batch as micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from rota.errors import PipelineError


def to_microbatches(name: str, batch: Any, num_microbatches: int, *, needed: bool = True) -> list[Any]:
    """A list is taken as the micro-batches themselves; tensors (alone, in tuples or dicts) are split along dim 0.

    What is no tensor goes to every micro-batch. Raises PipelineError where sizes do not fit; nothing is dropped. Where
    it is not `needed`, it is checked, but not split: all None.
    """
    if batch is None:
        return [None] * num_microbatches
    if isinstance(batch, list):
        if len(batch) != num_microbatches:
            raise PipelineError(
                f"{name} is a list of {len(batch)} micro-batches, but the plan has {num_microbatches}; "
                f"give {num_microbatches}, or plan for {len(batch)}"
            )
        return batch
    if not isinstance(batch, (torch.Tensor, tuple, dict)):
        raise PipelineError(
            f"{name} is of type {type(batch).__name__}; give a tensor, a tuple or a dict, or a list of micro-batches"
        )
    _refuse_unfitting([*_tensors(name, batch)], num_microbatches)
    return _split(batch, num_microbatches) if needed else [None] * num_microbatches


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors in a batch, each with its place."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (tuple, dict)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(f"{name}[{key!r}]", item)
    elif isinstance(value, list) and next(_tensors(name, tuple(value)), None):
        raise PipelineError(f"{name} is a list inside of a batch, which is not split; use a tuple")
    elif hasattr(value, "__array__"):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        remedy = "torch.as_tensor(…) of it" if getattr(value, "ndim", 1) else "its .item()"
        raise PipelineError(f"{name} is a {kind}, which is not split into micro-batches; give {remedy}")


def _refuse_unfitting(tensors: list[tuple[str, torch.Tensor]], n: int) -> None:
    rows_of_first = _num_rows(tensors[0][1]) if tensors else 0
    for name, tensor in tensors:
        rows = _num_rows(tensor)
        if rows and rows % n == 0 and rows == rows_of_first:
            continue
        told = f"{name} has {rows} rows (shape {list(tensor.shape)})"
        if not rows or rows % n:
            fitting = f"{rows // n * n} or {(rows // n + 1) * n} rows" if rows >= n else f"{n} rows or more"
            raise PipelineError(
                f"{told}, which do not divide into {n} micro-batches; give {fitting}, or a list of {n} micro-batches"
            )
        raise PipelineError(
            f"{told}, but {tensors[0][0]} has {rows_of_first}; give equally many, or a list of {n} micro-batches"
        )


def _num_rows(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 0


def _split(value: Any, n: int) -> list[Any]:
    if isinstance(value, torch.Tensor):
        # As of `split`, but one may be written into without the others counting as changed.
        return list(torch.unsafe_chunk(value, n))
    if isinstance(value, tuple):
        columns = [_split(item, n) for item in value]
        return [tuple(column[i] for column in columns) for i in range(n)]
    if isinstance(value, dict):
        named = {key: _split(item, n) for key, item in value.items()}
        return [{key: column[i] for key, column in named.items()} for i in range(n)]
    return [value] * n


def weights(inputs: Any, targets: Any, num_microbatches: int) -> list[float]:
    """Each micro-batch's share of the mean loss: equal parts of a split batch; by examples where a list was given."""
    for given in (targets, inputs):
        if isinstance(given, list):
            sizes = [num_examples(microbatch) for microbatch in given]
            if all(sizes):
                return [size / sum(sizes) for size in sizes]
    return [1 / num_microbatches] * num_microbatches


def num_examples(value: Any) -> int:
    """Rows of the first tensor in it; 0 if there is none."""
    if isinstance(value, torch.Tensor):
        return int(value.shape[0]) if value.dim() else 1
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return next((size for size in map(num_examples, value) if size), 0)
    return 0


def is_empty(value: Any) -> bool:
    """Whether the first tensor in it has no rows."""
    return any(tensor.dim() > 0 and not len(tensor) for tensor in islice(_every_tensor(value), 1))


def _every_tensor(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _every_tensor(item)


def structure(value: Any, plain: list[Any]) -> Any:
    """Shapes and dtypes of the tensors in it, and types of what else it holds: two of these compare.

    The bools, ints and texts in it are added to `plain`, as shapes may depend on them. Of floats and objects of other
    types the values are left out: a nan equals nothing, and `==` of others may be anything.
    """
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return {key: structure(item, plain) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [structure(item, plain) for item in value]
    if isinstance(value, (bool, int, str)):
        plain.append(value)
    return type(value), str(getattr(value, "shape", ""))


def describe(value: Any) -> str:
    """For people: "float32[2, 8]", "(float32[2], None)"."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype)[6:]}{list(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {describe(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(describe, value)) + ")"
    return "None" if value is None else type(value).__name__
