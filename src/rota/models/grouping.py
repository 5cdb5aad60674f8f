"""Stages made by hand, put together into fewer: runs of neighbours become one stage each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, final

from torch import nn

from rota.core.errors import SplitError
from rota.models.stage_edges import StageEdge
from rota.models.stages import Input, Stages

Value: TypeAlias = tuple[int, Any]  # what a stage returns, or an entry of it: the stage, and the key or None


class _Member(NamedTuple):
    """A stage in a group: its number, the values that it reads, and the positions of its inputs among the group's."""

    number: int
    reads: tuple[Value, ...]
    inputs: tuple[int, ...]


def grouped(stages: Stages, boundaries: Sequence[int]) -> Stages:
    """Stages of which the new stage i is those from boundaries[i] to boundaries[i + 1] - 1.

    What is named `weight` in stage 3 is `3.weight` then, however the stages are grouped.

    Raises:
        SplitError: An edge leads back, so that neighbours cannot run one after the other.
    """
    back = next((edge for edge in stages.edges if edge.source > edge.target), None)
    if back is not None:
        raise SplitError(f"edge {back} leads back: number the stages in the order in which they run")
    runs = [range(*pair) for pair in pairwise(boundaries)]
    group_of = {stage: group for group, run in enumerate(runs) for stage in run}
    parcels = _parcels(stages, group_of)
    inputs = [tuple(dict.fromkeys(wanted for stage in run for wanted in stages.inputs[stage])) for run in runs]
    modules = [_Group(stages, run, parcels, inputs[group], group) for group, run in enumerate(runs)]
    edges = [(*pair, pair[1]) for pair in sorted(parcels)]
    return Stages(modules, edges, inputs, stages.input_names, stages.input_defaults)


def _parcels(stages: Stages, group_of: dict[int, int]) -> dict[tuple[int, int], tuple[Value, ...]]:
    """For two groups the values that one sends the other, each once."""
    parcels: dict[tuple[int, int], dict[Value, None]] = {}
    for edge in stages.edges:
        pair = group_of[edge.source], group_of[edge.target]
        if pair[0] != pair[1]:
            parcels.setdefault(pair, {})[edge.source, edge.key] = None
    return {pair: tuple(values) for pair, values in parcels.items()}


@final
class _Group(nn.Module):
    """Some stages, one after the other; returns for each later group a tuple of values, by the group's number."""

    def __init__(
        self,
        stages: Stages,
        run: range,
        parcels: dict[tuple[int, int], tuple[Value, ...]],
        inputs: tuple[Input, ...],
        group: int,
    ) -> None:
        super().__init__()
        self._received = [values for (_, target), values in sorted(parcels.items()) if target == group]
        self._sent = {target: values for (source, target), values in sorted(parcels.items()) if source == group}
        self._members = [
            _Member(
                stage,
                tuple((edge.source, edge.key) for edge in stages.incoming(stage)),
                tuple(inputs.index(wanted) for wanted in stages.inputs[stage]),
            )
            for stage in run
        ]
        for stage in run:
            self.add_module(str(stage), stages[stage])

    def forward(self, *values: Any) -> Any:
        """The group's output, given the parcels of its incoming edges and its inputs."""
        inputs = values[len(self._received) :]
        received = {
            value: item
            for parcel, items in zip(self._received, values, strict=False)
            for value, item in zip(parcel, items, strict=True)
        }
        outputs: dict[int, Any] = {}

        def read(value: Value) -> Any:
            source, key = value
            return received[value] if value in received else StageEdge(source, -1, key).take(outputs[source])

        for number, reads, positions in self._members:
            arguments = (*map(read, reads), *(inputs[position] for position in positions))
            outputs[number] = self.get_submodule(str(number))(*arguments)
        if not self._sent:
            return outputs[self._members[-1].number]
        return {target: tuple(map(read, parcel)) for target, parcel in self._sent.items()}
