"""Models as lists of layers, and this rank's part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any, TypeVar, final

from torch import nn

from rota.compat.torchdistpackage.topology import tpc
from rota.cutting import balanced
from rota.errors import SplitError

Layers = TypeVar("Layers", bound=Sequence[Any])


@final
class Called(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Any) -> Any:
        return self.function(*values)


def flatten_model(
    model: nn.Module, layer_list: Iterable[str | nn.Module | Callable[..., Any]], return_list: bool = False
) -> nn.Sequential | list[nn.Module]:
    """The layers in the order of `layer_list`, as a Sequential or as a list. Raises SplitError.

    A text names an attribute of the model, whose layers stand for it if it is a Sequential or a ModuleList.
    """
    layers = [layer for i, given in enumerate(layer_list) for layer in _layers(model, i, given)]
    return layers if return_list else nn.Sequential(*layers)


def _layers(model: nn.Module, i: int, given: Any) -> list[nn.Module]:
    layer = given
    if isinstance(given, str):
        try:
            layer = attrgetter(given)(model)
        except AttributeError as error:
            raise SplitError(
                f"layer_list[{i}] is {given!r}, but {type(model).__name__} has no such layer: {error}"
            ) from None
        if isinstance(layer, nn.Sequential | nn.ModuleList):
            return [*layer]
    if isinstance(layer, nn.Module):
        return [layer]
    if callable(layer):
        return [Called(layer)]
    raise SplitError(f"layer_list[{i}] is {given!r}: give the name of a layer, a module or a function")


def partition_uniform(flat_sequence: Layers, extra_len: int = 0) -> Layers:
    """This rank's layers: equally many each, and the rest for the last; `extra_len` counts layers not in the list."""
    rank, size = tpc.get_group_rank("pipe"), tpc.get_group_size("pipe")
    length = (len(flat_sequence) + extra_len) // size
    end = (rank + 1) * length if rank < size - 1 else len(flat_sequence)
    return flat_sequence[rank * length : end]  # type: ignore[return-value]


def partition_balanced(flat_sequence: Layers, sequence: Any = None, **kwargs: Any) -> Layers:  # noqa: ARG001
    """This rank's layers, so that no cut has a smaller largest part, by number of parameters.

    A layer without any counts as one. `sequence` and what follows are taken for code that passes them, and not used.
    """
    weights = [sum(p.numel() for p in getattr(layer, "parameters", list)()) or 1 for layer in flat_sequence]
    parts = [*pairwise(balanced(weights, tpc.get_group_size("pipe")))]
    return flat_sequence[slice(*parts[tpc.get_group_rank("pipe")])]  # type: ignore[return-value]
