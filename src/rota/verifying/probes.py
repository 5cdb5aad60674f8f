"""Probes: inputs and outputs of a model's modules, as a few sums that are cheap to send and compare."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import nn

from rota.runtime.messages import items

_CLAMP = 1e6  # masks have -inf
_TOLERANCE = 1e-7
_TIMES_ROUNDING = 16  # in dtypes in which that is more than _TOLERANCE
_MOST_ROWS = 1 << 14  # of a tensor; for more, only its sums are kept

#: (sum, sum of magnitudes, sum of squares) of each tensor, added up over all calls, then the number of calls; by
#: "in NAME" or "out". None if the value was None.
Seen: TypeAlias = dict[str, list[float] | None]


class Rows(NamedTuple):
    """A tensor in one call: a number for each of its rows, along its first dimension.

    Sums over all rows would not do: a norm makes sums and squares what they are on any batch.

    Attributes:
        row_shape: The shape of a row.
        rounding: The relative difference that rounding may make in its dtype.
        sums: As in `Seen`, without the number of calls.
        by_row: Each row's sum, its elements weighted by their places; None without rows, or with too many of them.
        scale: The largest sum of the magnitudes of a row.
    """

    row_shape: tuple[int, ...]
    rounding: float
    sums: list[float]
    by_row: torch.Tensor | None
    scale: float


@final
class Probes:
    """What each module was given and returned, by its name in the unsplit model, in the order of the first calls.

    With `by_rows`, `rows` has it row by row too, for each call; None where the value was None.
    """

    def __init__(self, by_rows: bool = False) -> None:
        self.seen: dict[str, Seen] = {}
        self.order: list[tuple[str, str]] = []
        self.rows: dict[str, dict[str, list[Rows | None]]] = {}
        self._by_rows = by_rows

    @contextmanager
    def on(self, modules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
        """Watch these modules, which are given with their names."""
        with ExitStack() as stack:
            for name, module in modules:
                stack.enter_context(module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
                stack.enter_context(module.register_forward_hook(partial(self._leave, name)))
            yield

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for argument, value in _bound(module, args, kwargs).items():
            self._note(name, f"in {argument}", value)

    def _leave(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        del module, args
        self._note(name, "out", output)

    def _note(self, name: str, where: str, value: Any) -> None:
        for path, leaf in leaves(where, value):
            seen = self.seen.setdefault(name, {})
            if path not in seen:
                self.order.append((name, path))
            if self._by_rows:
                rows = None if leaf is None else _rows(leaf)
                self.rows.setdefault(name, {}).setdefault(path, []).append(rows)
            if leaf is None:
                seen.setdefault(path, None)
                continue
            sums, before = _sums(leaf), seen.get(path)
            seen[path] = [*sums, 1.0] if before is None else [a + b for a, b in zip(before, [*sums, 1.0], strict=True)]


def _bound(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
    """The arguments by their names in the module's forward."""
    signature = inspect.signature(module.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:  # the call itself will raise it
        return {}
    bound.apply_defaults()
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        by_keyword = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        arguments |= value if by_keyword else {name: value}
    return arguments


def leaves(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
    """The tensors and Nones in a value that begins at `path`, each with its own path."""
    if type(value) in (torch.Tensor, nn.Parameter) and not value.is_meta:
        yield path, value
    elif value is None:
        yield path, None
    else:
        for key, item in items(value):
            yield from leaves(f"{path}[{key!r}]", item)


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    numbers = tensor.detach().abs() if tensor.is_complex() else tensor.detach()
    return numbers.double().nan_to_num().clamp(-_CLAMP, _CLAMP)


def _sums(tensor: torch.Tensor) -> list[float]:
    numbers = _numbers(tensor)
    return torch.stack([numbers.sum(), numbers.abs().sum(), numbers.square().sum()]).tolist()


def _rows(tensor: torch.Tensor) -> Rows:
    is_rounded = tensor.is_floating_point() or tensor.is_complex()
    rounding = max(_TOLERANCE, _TIMES_ROUNDING * torch.finfo(tensor.dtype).eps if is_rounded else 0.0)
    if not tensor.dim() or not 0 < len(tensor) <= _MOST_ROWS or not tensor.numel():
        return Rows(tuple(tensor.shape[1:]), rounding, _sums(tensor), None, 0.0)
    rows = _numbers(tensor).reshape(len(tensor), -1)
    weights = 1 + torch.arange(rows.shape[1], dtype=rows.dtype, device=rows.device).cos() / 2
    scale = float(rows.abs().sum(1).max())
    return Rows(tuple(tensor.shape[1:]), rounding, _sums(tensor), (rows @ weights).cpu(), scale)


def rows_differ(on_whole: list[Rows | None], on_parts: list[Rows | None]) -> bool:
    """Whether the rows of some calls differ from those of others, in which they may be divided otherwise.

    Values without rows, such as masks, are the same in each call, or differ.
    """
    whole, parts = ([rows for rows in calls if rows is not None] for calls in (on_whole, on_parts))
    if len(whole) < len(on_whole) or len(parts) < len(on_parts) or not (whole and parts):
        return bool(whole or parts)
    calls = [*whole, *parts]
    rounding = max(rows.rounding for rows in calls)
    a, b = _sorted_rows(whole), _sorted_rows(parts)
    has_rows_alike = len({rows.row_shape for rows in calls}) == 1
    if has_rows_alike and a is not None and b is not None and a.shape == b.shape:
        scale = max(rows.scale for rows in calls)
        return bool((a - b).abs().max() > rounding * max(scale, 1e-30))
    sums, other_sums = _total(whole), _total(parts)
    return differ(sums, other_sums, rounding) and differ(mean(sums), mean(other_sums), rounding)


def _total(calls: list[Rows]) -> list[float]:
    """As in `Seen`."""
    return [*(sum(rows.sums[i] for rows in calls) for i in range(3)), float(len(calls))]


def _sorted_rows(calls: list[Rows]) -> torch.Tensor | None:
    """The rows of all calls, as modules may reorder them, such as to windows or experts."""
    tensors = [rows.by_row for rows in calls if rows.by_row is not None]
    return torch.cat(tensors).sort().values if len(tensors) == len(calls) else None


def mean(seen: list[float]) -> list[float]:
    """The sums, divided by the number of calls."""
    *sums, calls = seen
    return [total / calls for total in sums]


def differ(sums: list[float], others: list[float], tolerance: float = _TOLERANCE) -> bool:
    """Whether sums, sums of magnitudes or sums of squares differ by more than rounding."""
    scale, square = max(sums[1], others[1], 1e-30), max(sums[2], others[2], 1e-30)
    limits = (tolerance * largest for largest in (scale, scale, square))
    return any(abs(a - b) > limit for a, b, limit in zip(sums, others, limits, strict=False))
