"""Probes: inputs and outputs of a model's modules, as a few sums that are cheap to send and compare."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeAlias, final

import torch
from torch import nn

from rota.runtime.messages import items

_CLAMP = 1e6  # masks have -inf
_TOLERANCE = 1e-7

#: (sum, sum of magnitudes, sum of squares) of each tensor, added up over all calls, then the number of calls; by
#: "in NAME" or "out". None if the value was None.
Seen: TypeAlias = dict[str, list[float] | None]


@final
class Probes:
    """What each module was given and returned, by its name in the unsplit model, in the order of the first calls."""

    def __init__(self) -> None:
        self.seen: dict[str, Seen] = {}
        self.order: list[tuple[str, str]] = []

    @contextmanager
    def on(self, modules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
        """Watch these modules, which are given with their names."""
        with ExitStack() as stack:
            for name, module in modules:
                before = module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
                after = module.register_forward_hook(partial(self._leave, name))
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for argument, value in _bound(module, args, kwargs).items():
            self._note(name, f"in {argument}", value)

    def _leave(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        del module, args
        self._note(name, "out", output)

    def _note(self, name: str, where: str, value: Any) -> None:
        for path, leaf in _leaves(where, value):
            seen = self.seen.setdefault(name, {})
            if path not in seen:
                self.order.append((name, path))
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
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        by_keyword = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        found |= value if by_keyword else {name: value}
    return found


def _leaves(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
    if type(value) in (torch.Tensor, nn.Parameter) and not value.is_meta:
        yield path, value
    elif value is None:
        yield path, None
    else:
        for key, item in items(value):
            yield from _leaves(f"{path}[{key!r}]", item)


def _sums(tensor: torch.Tensor) -> list[float]:
    numbers = tensor.detach().abs() if tensor.is_complex() else tensor.detach()
    numbers = numbers.double().nan_to_num().clamp(-_CLAMP, _CLAMP)
    return torch.stack([numbers.sum(), numbers.abs().sum(), numbers.square().sum()]).tolist()


def mean(seen: list[float]) -> list[float]:
    """The sums, divided by the number of calls."""
    *sums, calls = seen
    return [each / calls for each in sums]


def differ(one: list[float], other: list[float]) -> bool:
    """Whether sums differ by more than rounding."""
    scale, square = max(one[1], other[1], 1e-30), max(one[2], other[2], 1e-30)
    return abs(one[0] - other[0]) > _TOLERANCE * scale or abs(one[2] - other[2]) > _TOLERANCE * square
