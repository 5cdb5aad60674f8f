"""A whole batch as the chunks of its samples: rows spread over samples, then each sample cut along dimension 1.

8 rows of length 100, samples of 3 chunks      4 samples of 2 rows, chunks of length 34, 33, 33
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rota.core.errors import PipelineError
from rota.runtime.messages import tensors_in, with_tensors
from rota.runtime.microbatches import Microbatches, num_examples, to_microbatches


def to_chunks(name: str, batch: Any, sample_of: Sequence[int], *, needed: bool = True) -> Microbatches:
    """As `to_microbatches`, for a placement with `sample_of`. A list holds the micro-batches themselves."""
    if batch is None or isinstance(batch, list):
        return to_microbatches(name, batch, len(sample_of), needed=needed)
    rows: dict[int, list[int]] = {}
    for m, sample in enumerate(sample_of):
        rows.setdefault(sample, []).append(m)
    given = to_microbatches(name, batch, len(rows))
    if given.padding:
        raise PipelineError(
            f"{name} has {given.num_rows} rows for {len(rows)} samples that are cut into chunks; give a row for each"
        )
    values: list[Any] = [None] * len(sample_of)
    for row, value in zip(rows.values(), given.values, strict=True):
        parts = _cut(name, value, len(row)) if needed and len(row) > 1 else [value if needed else None] * len(row)
        for m, part in zip(row, parts, strict=True):
            values[m] = part
    sizes = [num_examples(value) for value in given.values]
    order = {sample: i for i, sample in enumerate(rows)}
    return given._replace(values=values, sizes=tuple(sizes[order[sample]] for sample in sample_of))


def _cut(name: str, value: Any, num_chunks: int) -> list[Any]:
    """The value in parts along dimension 1 of all its tensors; the first parts are one longer if that must be."""
    lengths = {tuple(tensor.shape[1:2]) for tensor in tensors_in(value) if tensor.dim()}
    length = next(iter(lengths), ())
    if len(lengths) != 1 or not length or length[0] < num_chunks:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors_in(value))
        raise PipelineError(
            f"{name} has tensors of shapes {shapes}, which are not cut into {num_chunks} chunks; let dimension 1 of "
            f"each be the length, of {num_chunks} or more, or give a list of micro-batches that are cut already"
        )
    columns = [
        # Copies, so that a write into one part does not count as one into the others.
        [part.clone() for part in tensor.tensor_split(num_chunks, 1)] if tensor.dim() else [tensor] * num_chunks
        for tensor in tensors_in(value)
    ]
    return [with_tensors(value, (column[i] for column in columns)) for i in range(num_chunks)]
