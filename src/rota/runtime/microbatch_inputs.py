"""A step's batch as micro-batches: what a rank reads of it, and what it counts of the loss.

a tensor, tuple or dict   ──split along dim 0──▶  micro-batch 0, 1, …    equal shares of the mean loss
a list of micro-batches   ──as it is──────────▶  micro-batch 0, 1, …    shares by their examples
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any, final

import torch

from rota.errors import PipelineError
from rota.models import Stages
from rota.plan import Plan
from rota.runtime.compute import Batch
from rota.runtime.messages import describe_value, items, tensors_in
from rota.units import count_text


@final
class MicrobatchInputs:
    """What rank `rank` takes of each batch. `sink_ranks`: for each last stage its ranks."""

    def __init__(self, stages: Stages, plan: Plan, rank: int, sink_ranks: dict[int, tuple[int, ...]]) -> None:
        placement = plan.placement
        self._stages, self._rank, self._num_microbatches = stages, rank, plan.num_microbatches
        reading = [stage for stage in placement.stages if stages.inputs[stage]]
        #: The stages here that read the step's inputs, and their micro-
        self._reading = {
            stage: placement.microbatches(stage, plan.num_microbatches)
            for stage in placement.stages_on(rank)
            if stage in reading
        }
        self._is_first_reader = rank == min(chain(*map(placement.ranks_of, reading)), default=None)
        self._planned_rows = plan.microbatch_rows
        self.sink_ranks = sink_ranks

        def microbatches(stages: list[int]) -> list[int]:
            return sorted({m for stage in stages for m in placement.microbatches(stage, plan.num_microbatches)})

        self._read = microbatches([*self._reading])
        self._targeted = microbatches([sink for sink, ranks in self.sink_ranks.items() if rank in ranks])
        self._counted = {sink: microbatches([sink]) for sink, ranks in self.sink_ranks.items() if rank == ranks[0]}

    def take(self, inputs: Any, targets: Any, *, needs_targets: bool, scale: float = 1.0) -> Batch:
        """The micro-batches of a step. Raises PipelineError if something is missing or does not fit."""
        n = self._num_microbatches
        if inputs is None and self._reading:
            stage = next(iter(self._reading))
            raise PipelineError(
                f"rank {self._rank} holds stage {stage}, which reads the step's inputs "
                f"{list(self._stages.inputs[stage])}, but got inputs=None; pass the batch on this rank too"
            )
        given = (
            to_microbatches("inputs", inputs, n, needed=bool(self._reading)),
            to_microbatches("targets", targets, n, needed=bool(self._targeted)),
        )
        missing = [m for m in self._targeted if given[1][m] is None]
        if needs_targets and missing:
            got = "targets=None" if targets is None else f"targets[{missing[0]}] = None"
            raise PipelineError(f"rank {self._rank} holds the last stage, but got {got}; pass them on this rank")
        rows = (
            _rows(given[0], self._read, isinstance(inputs, list)),
            _rows(given[1], self._targeted, isinstance(targets, list)),
        )
        return Batch(*given, weights(inputs, targets, n), scale, not isinstance(inputs, list), *rows)

    def given(self, batch: Batch) -> dict[str, list[str]]:
        """What is read here, for people and to compare: by input, for each micro-batch; "" if it is not read."""
        found: dict[str, list[str]] = {}
        for stage, microbatches in self._reading.items():
            for m in microbatches[:1] if batch.alike else microbatches:
                with suppress(PipelineError):  # the op itself says what the batch lacks
                    values = self._stages.pick_inputs(stage, batch.inputs[m])
                    for wanted, value in zip(self._stages.inputs[stage], values, strict=True):
                        of_input = found.setdefault(str(wanted), [""] * self._num_microbatches)
                        of_input[m] = describe_value(value)
                        if batch.alike:
                            of_input[:] = of_input[m : m + 1] * self._num_microbatches
        return found

    def warn_of_other_rows(self, batch: Batch) -> None:
        """Warn once if the plan's times and bytes are of micro-batches of another size."""
        planned, self._planned_rows = self._planned_rows, None
        if planned is None or not self._is_first_reader or not batch.rows or planned in batch.rows:
            return
        least, most = min(batch.rows), max(batch.rows)
        given = f"{least}" if least == most else f"{least} to {most}"
        print(
            f"rota: the plan is for micro-batches of {count_text(planned, 'row')}, but this step's have {given}, "
            f"so the plan's times and memory do not hold; give {planned * self._num_microbatches} rows per step, or "
            f"profile with micro-batches of {most} and plan again",
            file=sys.stderr,
            flush=True,
        )

    def without_rows(self, batch: Batch) -> list[int]:
        """The micro-batches without rows, as this rank was given them."""
        return [m for m in self._targeted if is_empty(batch.targets[m]) or is_empty(batch.inputs[m])]

    def counted_loss(self, batch: Batch, losses: dict[int, float]) -> float:
        """This rank's summand of the mean loss: the first rank of each last stage counts it."""
        return sum(batch.shares[m] * losses.get(m, math.nan) for m in sorted(chain(*self._counted.values())))

    def losses_by_stage(self, losses: dict[int, float]) -> dict[int, dict[int, float]]:
        """The losses that are counted here, for each last stage."""
        return {sink: {m: losses[m] for m in of if m in losses} for sink, of in self._counted.items()}


def _rows(microbatches: Sequence[Any], read: Sequence[int], is_list: bool) -> tuple[int, ...]:
    """Of each micro-batch that is read here; of the first alone where a whole batch was split into equal ones."""
    return tuple(num_examples(microbatches[m]) for m in (read if is_list else read[:1]))


# --- any batch --------------------------------------------------------------------------------------------------------


def to_microbatches(name: str, batch: Any, num_microbatches: int, *, needed: bool = True) -> list[Any]:
    """A list is taken as the micro-batches themselves; tensors (alone, in tuples or dicts) are split along dim 0.

    Every micro-batch gets what is not a tensor. Raises PipelineError if sizes do not fit; nothing is dropped. A batch
    that is not `needed` is checked, but not split: all None.
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
    _refuse_unfitting([*_places(name, batch)], num_microbatches)
    return _split(batch, num_microbatches) if needed else [None] * num_microbatches


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


def _refuse_unfitting(tensors: list[tuple[str, torch.Tensor]], n: int) -> None:
    rows_of_first = _num_rows(tensors[0][1]) if tensors else 0
    for name, tensor in tensors:
        rows = _num_rows(tensor)
        if rows and rows % n == 0 and rows == rows_of_first:
            continue
        found = f"{name} has {rows} rows (shape {list(tensor.shape)})"
        if not rows or rows % n:
            fitting = f"{rows // n * n} or {(rows // n + 1) * n} rows" if rows >= n else f"{n} rows or more"
            raise PipelineError(
                f"{found}, which do not divide into {n} micro-batches; give {fitting}, or a list of {n} micro-batches"
            )
        raise PipelineError(
            f"{found}, but {tensors[0][0]} has {rows_of_first}; give equally many, or a list of {n} micro-batches"
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
    """Rows of the first tensor that has any, a scalar counting as one; 0 without one."""
    sizes = (len(tensor) if tensor.dim() else 1 for tensor in tensors_in(value))
    return next((size for size in sizes if size), 0)


def is_empty(value: Any) -> bool:
    """Whether the first tensor in it has no rows."""
    return any(tensor.dim() > 0 and not len(tensor) for tensor in islice(tensors_in(value), 1))


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
