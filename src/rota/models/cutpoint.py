"""CutPoint: a place in a model's forward where a stage may end, and how to find those of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar, final

from torch import nn

T = TypeVar("T")


@final
class CutPoint(nn.Module):
    """A possible boundary between two stages: it returns its input. Call each CutPoint once per forward.

    It has no state, so a plain Python list of them works as well as an `nn.ModuleList` or an attribute.
    """

    def forward(self, x: T) -> T:
        """Return `x` itself, whatever it is."""
        return x


def find_cut_points(module: nn.Module) -> dict[CutPoint, str]:
    """All cut points that `module` holds, registered or in plain attributes, with their attribute paths."""
    cut_points: dict[CutPoint, str] = {}
    seen: set[int] = set()  # attributes may lead back to a parent

    def visit(value: object, path: str) -> None:
        if isinstance(value, CutPoint):
            cut_points.setdefault(value, path)
        elif isinstance(value, nn.Module | list | tuple | dict) and id(value) not in seen:
            seen.add(id(value))
            for step, child in _children(value):
                visit(child, (path + step).lstrip("."))

    visit(module, "")
    return cut_points


def _children(holder: nn.Module | list[Any] | tuple[Any, ...] | dict[Any, Any]) -> Iterator[tuple[str, object]]:
    """What an object holds, each with the step that leads there: `.name`, `[index]` or `['key']`."""
    if isinstance(holder, nn.Module):
        registered = vars(holder)["_modules"]
        yield from ((f".{name}", child) for name, child in registered.items())
        yield from ((f".{name}", value) for name, value in vars(holder).items() if value is not registered)
    elif isinstance(holder, dict):
        yield from ((f"[{key!r}]", value) for key, value in holder.items())
    else:
        yield from ((f"[{index}]", value) for index, value in enumerate(holder))
