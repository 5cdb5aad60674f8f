"""From costs measured at several sizes of micro-batch to a model of costs by size, with its error.

    figure = constant + per_token · tokens + per_square · squares,   all of them 0 or more

Times are fitted by least squares of relative errors, so that a short micro-batch counts as much as a long one. Bytes
are fitted in the same way and then raised until no measured size needs more than the model says, and none frees less,
as a limit of memory asks for. With three coefficients, non-negative least squares needs no iterations: the best of the
seven sets of coefficients that may be other than 0 is the optimum (Lawson and Hanson, "Solving Least Squares Problems",
1974, chapter 23).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain, combinations
from operator import mul
from typing import Any

from rota.core.costs import Costs
from rota.core.errors import PlacementError
from rota.core.sizes import CURVES, Curve, Size, SizeModel

_LEAST_US = 100  # of shorter times, what whole microseconds and interrupts make of them says nothing
_PIVOT = 1e-9  # relative; below it the sizes cannot tell two coefficients apart


def fit_sizes(measured: Sequence[tuple[Size, Costs]]) -> SizeModel:
    """A model of costs by the size of a micro-batch, from costs that were measured at several sizes.

    Args:
        measured: Each size with the costs of all stages there. Three sizes or more, with different lengths, tell
            constant, linear and quadratic terms apart; with fewer the terms that are left are the smallest that fit.

    Returns:
        The model. Its `error` is the largest relative error of a time of 100 µs or more at these sizes; bytes at these
        sizes are never below those that were measured.

    Raises:
        PlacementError: There are fewer than two different sizes, the costs have different stages or edges, or a stage
            has costs of recomputation, which the model has no term for.
    """
    sizes = [size for size, _ in measured]
    if len({*sizes}) < 2:
        raise PlacementError(f"measured has {len({*sizes})} different sizes: give two or more, such as three lengths")
    first = measured[0][1]

    def shape(costs: Costs) -> tuple[object, ...]:
        return costs.num_stages, costs.edges, costs.weight_us is None

    for size, costs in measured:
        if shape(costs) != shape(first):
            raise PlacementError(f"the costs at {size} have other stages, edges or backwards than those at {sizes[0]}")
        if costs.recompute_us is not None and any(us is not None for us in costs.recompute_us):
            raise PlacementError(f"the costs at {size} have recompute_us, which a model of sizes has no term for")
    curves: dict[str, Any] = {}
    error = 0.0
    for name in CURVES:
        columns = _columns(name, [costs for _, costs in measured])
        if columns is None:
            curves[name] = None
            continue
        if name.endswith("_us"):
            curves[name] = tuple(_non_negative(sizes, column) for column in columns)
            error = max([error, *map(partial(_error, sizes), curves[name], columns)])
        else:
            sign = -1 if name == "input_frees_bytes" else 1
            curves[name] = tuple(_bytes_curve(sizes, column, sign) for column in columns)
    last = max(measured, key=lambda entry: entry[0].tokens)[1]
    return SizeModel(
        **curves,
        static_bytes=tuple(map(max, *(costs.static_bytes for _, costs in measured))),
        reduce_us=last.reduce_us,
        optimizer_us=last.optimizer_us,
        edges=first.edges,
        error=error,
        note=f"{first.note + '; ' if first.note else ''}fitted to {len(measured)} sizes",
    )


def _columns(name: str, all_costs: Sequence[Costs]) -> list[list[int]] | None:
    """For each stage or edge its figure at each size; None if there are none."""
    rows = []
    for costs in all_costs:
        value = getattr(costs, name)
        if value is None:
            return None
        num_edges = costs.num_stages - 1 if costs.edges is None else len(costs.edges)
        rows.append((value,) * num_edges if isinstance(value, int) else value)
    return [list(column) for column in zip(*rows, strict=True)]


def _bytes_curve(sizes: Sequence[Size], values: Sequence[int], sign: int) -> Curve:
    """Never below what was measured; with `sign` -1 never above, and negative where more is kept than freed."""
    curve = _non_negative(sizes, values)
    short = max(sign * (value - curve.at(size)) for size, value in zip(sizes, values, strict=True))
    return curve._replace(constant=curve.constant + sign * short) if short > 0 else curve


def _error(sizes: Sequence[Size], curve: Curve, values: Sequence[int]) -> float:
    pairs = zip(sizes, values, strict=True)
    return max((abs(curve.at(size) - value) / value for size, value in pairs if value >= _LEAST_US), default=0.0)


def _non_negative(sizes: Sequence[Size], values: Sequence[int]) -> Curve:
    """Least squares of relative errors with coefficients of 0 or more; of equal fits the one with fewest of them."""
    weights = [1 / max(abs(value), 1) for value in values]
    scale = (1.0, float(max(size.tokens for size in sizes)), float(max(size.squares for size in sizes)))
    rows = [
        [weight * term / most for term, most in zip((1, *size), scale, strict=True)]
        for size, weight in zip(sizes, weights, strict=True)
    ]
    targets = [weight * value for weight, value in zip(weights, values, strict=True)]
    best, least = [0.0, 0.0, 0.0], sum(target * target for target in targets)
    for chosen in chain.from_iterable(combinations(range(3), n) for n in (1, 2, 3)):
        solution = _least_squares([[row[i] for i in chosen] for row in rows], targets)
        if solution is None or min(solution) < 0:
            continue
        coefficients = [0.0, 0.0, 0.0]
        for i, value in zip(chosen, solution, strict=True):
            coefficients[i] = value
        fitted = (sum(map(mul, row, coefficients)) for row in rows)
        residual = sum((value - target) ** 2 for value, target in zip(fitted, targets, strict=True))
        if residual < least * (1 - _PIVOT):
            best, least = coefficients, residual
    return Curve(*(value / most for value, most in zip(best, scale, strict=True)))


def _least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float] | None:
    """The solution of the normal equations by elimination; None if the columns depend on each other."""
    n = len(rows[0])
    columns = [*zip(*rows, strict=True), targets]
    matrix = [[sum(map(mul, column, other)) for other in columns] for column in columns[:n]]
    for i in range(n):
        pivot = max(range(i, n), key=lambda k: abs(matrix[k][i]))
        if abs(matrix[pivot][i]) <= _PIVOT * max(sum(row[i] * row[i] for row in rows), 1e-300):
            return None
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for k in range(n):
            if k != i:
                factor = matrix[k][i] / matrix[i][i]
                matrix[k] = [a - factor * b for a, b in zip(matrix[k], matrix[i], strict=True)]
    return [matrix[i][n] / matrix[i][i] for i in range(n)]
