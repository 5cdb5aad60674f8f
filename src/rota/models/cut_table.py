"""The cut as text: one line per stage."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from rota.models.carving.stage import CarvedStage
from rota.models.stage_edges import StageEdge

HEADER = ("stage", "holds", "parameters", "bytes", "reads", "sends to")
NUMBERED = re.compile(r"((?:.*\.)?)(\d+)")


def cut_table(modules: Sequence[nn.Module], edges: Iterable[StageEdge], inputs: Sequence[Sequence[int | str]]) -> str:
    """What each stage holds, its parameters and their bytes, the inputs it reads and the stages it sends to."""
    targets: list[list[str]] = [[] for _ in modules]
    for edge in edges:
        targets[edge.source].append(str(edge.target))
    rows = [HEADER]
    for stage, module in enumerate(modules):
        num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
        rows.append(
            (
                str(stage),
                holds(module),
                f"{sum(parameter.numel() for parameter in module.parameters()):,}",
                f"{num_bytes:,}",
                ", ".join(map(str, inputs[stage])) or "-",
                ", ".join(targets[stage]) or "-",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def holds(module: nn.Module) -> str:
    """What a stage holds, by name: `embed, blocks.0-2`; its class if nothing in it has a name."""
    if isinstance(module, CarvedStage):
        return ", ".join(condense(module.holds)) or "-"
    if not any(module.children()):
        return type(module).__name__
    return ", ".join(condense(_names(module))) or "-"


def _names(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Names of what a stage holds, looking through modules that only contain others, as ModuleList does."""
    yield from (prefix + name for name, _ in module.named_parameters(recurse=False))
    for name, child in module.named_children():
        if type(child) in (nn.Module, nn.ModuleList, nn.ModuleDict):
            yield from _names(child, f"{prefix}{name}.")
        else:
            yield prefix + name


def condense(names: Iterable[str]) -> list[str]:
    """Runs of numbered neighbours as one: a, b.0, b.1, b.2 -> a, b.0-2."""
    runs: list[tuple[str, int | None, int | None]] = []  # what comes before the number; first and last number
    for name in names:
        match = NUMBERED.fullmatch(name)
        before, number = (match[1], int(match[2])) if match else (name, None)
        if runs and number is not None and (runs[-1][0], runs[-1][2]) == (before, number - 1):
            runs[-1] = (before, runs[-1][1], number)
        else:
            runs.append((before, number, number))
    return [
        before if first is None else f"{before}{first}" if first == last else f"{before}{first}-{last}"
        for before, first, last in runs
    ]
