"""Any batch as micro-batches.

    a tensor, tuple or mapping   ──rows split along dim 0───▶  micro-batch 0, 1, …    8 rows into 3: 3, 3, 2
    a list of micro-batches      ──as it is────────────────▶  micro-batch 0, 1, …

What has no rows goes whole to every micro-batch: numbers, texts, None, tensors without dims, and tensors with one row
beside others with more. If there are fewer rows than micro-batches, the last micro-batches are padding: they get the
first row again, and do not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

from rota.core.errors import PipelineError
from rota.runtime.messages import items, tensors_in, with_tensors
from rota.torch_internals import version_of


class Microbatches(NamedTuple):
    """`values` by micro-batch.

    `sizes`: their numbers of rows; () if a batch was split equally, or nothing has rows. `num_rows`: rows of the whole
    batch; 0 if none was split. `padding`: those that are padding. `shared`: tensors that all get whole, with their
    places and versions.
    """

    values: list[Any]
    sizes: tuple[int, ...] = ()
    num_rows: int = 0
    padding: tuple[int, ...] = ()
    shared: tuple[tuple[str, torch.Tensor, int], ...] = ()


def to_microbatches(name: str, batch: Any, num_microbatches: int, *, needed: bool = True) -> Microbatches:
    """A list holds the micro-batches themselves; tensors (alone, in tuples or mappings) are split along dim 0.

    Mappings become dicts. Raises PipelineError if sizes do not fit; nothing is dropped. A batch that is not `needed` is
    checked, but not split: all None.
    """
    n = num_microbatches
    if batch is None:
        return Microbatches([None] * n)
    if isinstance(batch, torch.Tensor) and batch.dim() and (num_rows := len(batch)) and not num_rows % n:  # as most are
        return Microbatches([*torch.unsafe_split(batch, num_rows // n)] if needed else [None] * n, (), num_rows)
    if isinstance(batch, list):
        if len(batch) != n:
            raise PipelineError(
                f"{name} is a list of {len(batch)} micro-batches, but the plan has {n}; give {n}, or plan for "
                f"{len(batch)}"
            )
        return Microbatches([*map(with_dicts, batch)], _sizes_of_list(batch))
    if not isinstance(batch, (torch.Tensor, tuple, Mapping)):
        raise PipelineError(
            f"{name} is of type {type(batch).__name__}; give a tensor, a tuple or a mapping such as a dict, or a list "
            f"of micro-batches"
        )
    batch = with_dicts(batch)
    places = [*_places(name, batch)]
    num_rows = _common_rows(places, n)
    _refuse_lists_of_rows(name, batch, num_rows)
    if not places:
        return Microbatches([batch if needed else None] * n)
    sizes = _spread(num_rows, n)
    return Microbatches(
        _split(batch, num_rows, sizes) if needed else [None] * n,
        tuple(sizes) if len({*sizes}) > 1 else (),
        num_rows,
        tuple(m for m, size in enumerate(sizes) if not size),
        tuple((place, tensor, version_of(tensor)) for place, tensor in places if _is_shared(tensor, num_rows)),
    )


def refuse_writes_to_shared(*batches: Microbatches) -> None:
    """Raises PipelineError if a stage has written to a tensor that all micro-batches get."""
    for place, tensor, version in [shared for batch in batches for shared in batch.shared]:
        if version_of(tensor) != version:
            raise PipelineError(
                f"a stage writes into {place} (shape {list(tensor.shape)}), which is the same for all micro-batches, "
                f"so later ones have read what was written; let the stage begin with an operation that is not in place"
            )


def with_dicts(value: Any) -> Any:
    """The value with all mappings in it as dicts."""
    if isinstance(value, Mapping):
        return {key: with_dicts(item) for key, item in value.items()}
    if type(value) is tuple:
        return tuple(map(with_dicts, value))
    return value


def _places(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors in a batch, each with its place."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, list) and next(_places(name, tuple(value)), None):
        raise PipelineError(f"{name} is a list inside of a batch, which is not split; use a tuple")
    elif isinstance(value, (tuple, dict)):
        for key, item in items(value):
            yield from _places(f"{name}[{key!r}]", item)
    elif hasattr(value, "__array__"):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        remedy = "torch.as_tensor(…) of it" if getattr(value, "ndim", 1) else "its .item()"
        raise PipelineError(f"{name} is a {kind}, which is not split into micro-batches; give {remedy}")


def _common_rows(places: list[tuple[str, torch.Tensor]], n: int) -> int:
    """How many rows the batch has. Raises PipelineError if its tensors do not agree on it."""
    counted = [(name, tensor, tensor.shape[0]) for name, tensor in places if tensor.dim()]
    many = [tensor for tensor in counted if tensor[2] != 1] or counted
    if not many:
        if places:
            raise PipelineError(
                f"{places[0][0]} has shape [], so there are no rows to split; give a tensor with a row per example, or "
                f"a list of {n} micro-batches"
            )
        return 0
    first, _, num_rows = many[0]
    for name, tensor, rows in many:
        if rows == num_rows and rows:
            continue
        rows_text = f"{name} has {rows} rows (shape {list(tensor.shape)})"
        if not rows:
            raise PipelineError(f"{rows_text}; give one row or more")
        raise PipelineError(
            f"{rows_text}, but {first} has {num_rows}; give the same number, one row that is the same for all, or a "
            f"list of {n} micro-batches"
        )
    return num_rows


def _refuse_lists_of_rows(name: str, value: Any, num_rows: int) -> None:
    """A list with as many items as rows looks like one item per row, but every micro-batch would get all of it."""
    for key, item in items(value) if isinstance(value, (dict, tuple)) else ():
        if isinstance(item, list) and num_rows > 1 and len(item) == num_rows:
            raise PipelineError(
                f"{name}[{key!r}] is a list of {num_rows} items beside tensors of {num_rows} rows, and lists are not "
                f"split; give a tensor, a list of micro-batches, or a tuple if every micro-batch shall get all of it"
            )
        _refuse_lists_of_rows(f"{name}[{key!r}]", item, num_rows)


def _spread(num_rows: int, n: int) -> list[int]:
    """Rows per micro-batch; the first ones get one more if the rows do not divide evenly."""
    least, more = divmod(num_rows, n)
    return [least + 1] * more + [least] * (n - more)


def _is_shared(tensor: torch.Tensor, num_rows: int) -> bool:
    return not tensor.dim() or len(tensor) == 1 < num_rows


def _split(value: Any, num_rows: int, sizes: list[int]) -> list[Any]:
    n = len(sizes)
    if isinstance(value, torch.Tensor):
        if _is_shared(value, num_rows):
            return [value] * n
        filled = [size for size in sizes if size]
        # Like `split`, but a write into one does not change the version of the others.
        parts = iter(torch.unsafe_split_with_sizes(value, filled))
        return [next(parts) if size else value[:1].clone() for size in sizes]
    if isinstance(value, tuple):
        columns = [_split(item, num_rows, sizes) for item in value]
        make = getattr(value, "_make", tuple)
        return [make(column[i] for column in columns) for i in range(n)]
    if isinstance(value, dict):
        named = {key: _split(item, num_rows, sizes) for key, item in value.items()}
        return [{key: column[i] for key, column in named.items()} for i in range(n)]
    return [value] * n


def _sizes_of_list(batch: list[Any]) -> tuple[int, ...]:
    """Rows per micro-batch; () if a micro-batch has no tensor that shows them."""
    sizes = [num_examples(microbatch) for microbatch in batch]
    are_known = all(size or is_empty(microbatch) for size, microbatch in zip(sizes, batch, strict=True))
    return tuple(sizes) if are_known else ()


def shares_of(sizes: Sequence[int], num_microbatches: int) -> list[float]:
    """Each micro-batch's share of a mean loss: in proportion to its rows, or equal without `sizes`."""
    if not (num_rows := sum(sizes)):
        return [1 / num_microbatches] * num_microbatches
    return [size / num_rows for size in sizes]


def num_examples(value: Any) -> int:
    """Rows of the first tensor that has several, else 1; 0 without a tensor that has rows. A scalar counts as one."""
    sizes = [len(tensor) if tensor.dim() else 1 for tensor in tensors_in(value)]
    return next((size for size in sizes if size > 1), max(sizes, default=0))


def num_elements(value: Any) -> int:
    """The number of elements of the largest tensor in it; 0 without one."""
    return max((tensor.numel() for tensor in tensors_in(value)), default=0)


def is_empty(value: Any) -> bool:
    """Whether the first tensor in it has no rows."""
    return any(tensor.dim() > 0 and not len(tensor) for tensor in islice(tensors_in(value), 1))


def structure(value: Any, plain: list[Any]) -> Any:
    """Shapes and dtypes of the tensors in it, and types of what else it holds: two of these compare.

    The bools, ints and texts in it are added to `plain`, as shapes may depend on them. Values of floats
    and of other objects are left out: nan equals nothing, and `==` of other objects may return anything.
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


# --- samples in chunks ------------------------------------------------------------------------------------------------


def to_chunks(name: str, batch: Any, sample_of: Sequence[int], *, needed: bool = True) -> Microbatches:
    """As `to_microbatches`, for a placement with `sample_of`: rows spread over samples, each cut along dimension 1.

    8 rows of length 100, samples of 3 chunks: 4 samples of 2 rows, chunks of length 34, 33 and 33. A list holds the
    micro-batches themselves.
    """
    if batch is None or isinstance(batch, list):
        return to_microbatches(name, batch, len(sample_of), needed=needed)
    rows: dict[int, list[int]] = {}
    for m, sample in enumerate(sample_of):
        rows.setdefault(sample, []).append(m)
    samples = to_microbatches(name, batch, len(rows))
    if samples.padding:
        raise PipelineError(
            f"{name} has {samples.num_rows} rows for {len(rows)} samples that are cut into chunks; give a row for each"
        )
    values: list[Any] = [None] * len(sample_of)
    for row, value in zip(rows.values(), samples.values, strict=True):
        parts = _cut(name, value, len(row)) if needed and len(row) > 1 else [value if needed else None] * len(row)
        for m, part in zip(row, parts, strict=True):
            values[m] = part
    sizes = dict(zip(rows, map(num_examples, samples.values), strict=True))
    return samples._replace(values=values, sizes=tuple(sizes[sample] for sample in sample_of))


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
