"""Models as lists of layers, and this rank's part of a list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any, final

from torch import nn

from rota.compat.torchdistpackage.topology import tpc
from rota.core.errors import SplitError
from rota.cutting import balanced


@final
class Called(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Any) -> Any:
        """Call the function."""
        return self.function(*values)


def flatten_model(
    model: nn.Module, layer_list: Iterable[str | nn.Module | Callable[..., Any]], return_list: bool = False
) -> nn.Sequential | list[nn.Module]:
    """Return a model's layers in the order of `layer_list`.

    Args:
        model: The model.
        layer_list: Names of the model's attributes (a Sequential or ModuleList stands for its layers), modules, and
            functions.
        return_list: Whether to return a list instead of a Sequential.

    Raises:
        SplitError: If the model has no such attribute, or an entry is not a layer.
    """
    layers = [layer for i, entry in enumerate(layer_list) for layer in _layers(model, i, entry)]
    return layers if return_list else nn.Sequential(*layers)


def _layers(model: nn.Module, i: int, entry: Any) -> list[nn.Module]:
    layer = entry
    if isinstance(entry, str):
        try:
            layer = attrgetter(entry)(model)
        except AttributeError as error:
            raise SplitError(
                f"layer_list[{i}] is {entry!r}, but {type(model).__name__} has no such layer: {error}"
            ) from None
        if isinstance(layer, nn.Sequential | nn.ModuleList):
            return [*layer]
    if isinstance(layer, nn.Module):
        return [layer]
    if callable(layer):
        return [Called(layer)]
    raise SplitError(f"layer_list[{i}] is {entry!r}: give the name of a layer, a module or a function")


def partition_uniform(flat_sequence: Sequence[Any], extra_len: int = 0) -> Sequence[Any]:
    """Return this rank's layers: the same number for each, the remainder for the last.

    `extra_len` is a number of layers that are not in the list, but count for the length.
    """
    rank, size = tpc.get_group_rank("pipe"), tpc.get_group_size("pipe")
    length = (len(flat_sequence) + extra_len) // size
    end = (rank + 1) * length if rank < size - 1 else len(flat_sequence)
    return flat_sequence[rank * length : end]


def partition_balanced(flat_sequence: Sequence[Any], sequence: Any = None, **kwargs: Any) -> Sequence[Any]:  # noqa: ARG001
    """Return this rank's layers, cut so that the largest number of parameters per rank is minimal.

    A layer without parameters counts as 1. `sequence` and `kwargs` are accepted for existing code, and not used.
    """
    weights = [sum(p.numel() for p in getattr(layer, "parameters", list)()) or 1 for layer in flat_sequence]
    parts = [*pairwise(balanced(weights, tpc.get_group_size("pipe")))]
    return flat_sequence[slice(*parts[tpc.get_group_rank("pipe")])]
