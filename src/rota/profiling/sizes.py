"""Costs of stages by the size of a micro-batch: profiled at several lengths and numbers of rows, and fitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rota.calibration.size_fit import fit_sizes
from rota.errors import PipelineError
from rota.models import Stages
from rota.profiling.stage_profile import profile, profile_here
from rota.runtime.losses import LossFn
from rota.sizes import Size, SizeModel


def profile_sizes(
    stages: Stages,
    make_batch: Callable[[int, int], tuple[Any, Any]],
    loss_fn: LossFn | None = None,
    *,
    lengths: Sequence[int],
    rows: Sequence[int] = (1, 4),
    here: bool = False,
    report: Callable[[str], None] = lambda _: None,
    **others: Any,
) -> SizeModel:
    """Measure the costs of each stage at several sizes, and fit constant, linear and quadratic terms to them.

    Args:
        stages: The stages, on the CPU or on accelerators.
        make_batch: `make_batch(rows, length)` makes a micro-batch: inputs and targets.
        loss_fn: Computes the loss of the last stage's output and the target; None: the backward begins at the output.
        lengths: The lengths to measure; three or more, up to the longest that is trained.
        rows: The numbers of rows to measure each length with.
        here: Measure in this process, as `rota.profiling.profile_here` does: for a process of a running group.
        report: Called with a line of text.
        **others: Further arguments of `rota.profile`.

    Returns:
        The model, with the largest relative error of its times at the measured sizes.

    Raises:
        PipelineError: There are fewer than two lengths, or a stage fails, with its number.
    """
    if len({*lengths}) < 2:
        raise PipelineError(f"lengths is {list(lengths)}; give two or more, so that costs can be told by length")
    measured = []
    for length in lengths:
        for number in rows:
            report(f"{number} x {length}")
            inputs, targets = make_batch(number, length)
            costs = (profile_here if here else profile)(stages, inputs, targets, loss_fn, **others)
            measured.append((Size.padded([length] * number), costs))
    return fit_sizes(measured)
