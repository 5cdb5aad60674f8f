"""`deepspeed.runtime.utils`: cuts of a list of layers, and small helpers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from rota import cutting


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return `num_parts + 1` boundaries of parts as equal as possible, larger parts first; parts may be empty."""
    return cutting.uniform(num_items, num_parts)


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return `num_parts + 1` boundaries that minimize the weight of the heaviest part; parts may be empty."""
    return cutting.balanced(weights, num_parts)


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """Return the inclusive prefix sums of the weights."""
    return [*accumulate(weights)]


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Return a call as text: `base(1, key='value')`."""
    arguments = [repr(argument) for argument in args] + [f"{name}={value!r}" for name, value in kwargs.items()]
    return f"{base}({', '.join(arguments)})"


def _is_even(number: int) -> bool:
    return number % 2 == 0


def _is_odd(number: int) -> bool:
    return number % 2 == 1
