"""The time–cost frontier: the least cost for each total time, by Phillips and Dessouky's algorithm in package lowtime.

Phillips and Dessouky, "Solving the Project Time/Cost Tradeoff Problem Using the Minimal Cut Concept", 1977; for
pipelines Chung et al., "Reducing Energy Bloat in Large Model Training" (Perseus), SOSP 2024.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from itertools import pairwise
from math import ceil
from typing import Any, NamedTuple

from rota.compat.rene.instruction import Instruction, ReneError, exact_duration, in_whole_units
from rota.core.errors import RotaError
from rota.core.taskgraph import TaskGraph

Inputs = Sequence[Sequence[tuple[int, int]]]


class Option(NamedTuple):
    """One way to run an instruction."""

    duration: float
    cost: float
    frequency: Any


@dataclass(frozen=True)
class FrontierPoint:
    """One point of the frontier; `options[i]` is the choice for the DAG's i-th instruction."""

    total_execution_time: float
    cost: float
    options: tuple[Option, ...]


def frontier(insts: Sequence[Instruction], inputs: Inputs, unit_time: float) -> list[FrontierPoint]:
    """Return the frontier, fastest first; see `ReneDAG.frontier`."""
    if find_spec("lowtime") is None:
        raise RotaError("the time–energy frontier needs lowtime, which is not installed: pip install 'rota[energy]'")
    if not isinstance(unit_time, int | float) or not 0 < unit_time < float("inf"):
        raise ReneError(f"unit_time is {unit_time!r}; give the time unit in which durations are counted, such as 0.001")
    optionless = next((inst for inst in insts if not inst.options), None)
    if optionless is not None or not insts:
        raise ReneError(f"{optionless or 'an empty DAG'} has nothing to choose from; give ReneDAG time_costs")
    unit = Fraction(repr(float(unit_time)))
    curves: dict[Any, tuple[_Choice, ...]] = {}
    for inst in insts:
        if inst.options not in curves:
            curves[inst.options] = _convex_hull(inst, unit)
    points = [_point(insts, inputs, options) for options in _solve([curves[inst.options] for inst in insts], inputs)]
    best: list[FrontierPoint] = []
    for point in sorted(points, key=lambda point: (point.total_execution_time, point.cost)):
        if not best or point.cost < best[-1].cost:
            best.append(point)
    return best


class _Choice(NamedTuple):
    """An option with its duration in units, rounded up, so that no instruction lasts longer than is assumed."""

    units: int
    option: Option


def _convex_hull(inst: Instruction, unit: Fraction) -> tuple[_Choice, ...]:
    """Return the options on the lower convex hull of time and cost, fastest first: the algorithm needs convexity."""
    options = [Option(*option) for option in inst.options]
    choices = sorted(
        (_Choice(ceil(exact_duration(o.duration, inst) / unit), o) for o in options), key=lambda c: c[1][:2]
    )
    hull: list[_Choice] = []
    for choice in choices:
        if hull and choice.option.cost >= hull[-1].option.cost:
            continue  # slower and no cheaper
        if hull and choice.units == hull[-1].units:
            hull.pop()
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], choice):
            hull.pop()
        hull.append(choice)
    return tuple(hull)


def _slope(a: _Choice, b: _Choice) -> float:
    return (b.option.cost - a.option.cost) / (b.units - a.units)


@dataclass(frozen=True)
class _Curve:
    """The cost model that lowtime calls: linear between the choices."""

    choices: tuple[_Choice, ...]

    def __call__(self, units: int) -> float:
        for a, b in pairwise(self.choices):
            if a.units <= units <= b.units:
                return a.option.cost + _slope(a, b) * (units - a.units)
        return self.choices[0 if units < self.choices[0].units else -1].option.cost


def _solve(curves: Sequence[tuple[_Choice, ...]], inputs: Inputs) -> Iterator[list[Option]]:
    """Yield the options of all instructions: first the slowest, then the cheapest for less and less time."""
    from lowtime.graph_utils import add_sink_node, add_source_node
    from lowtime.operation import CandidateExecutionOptions, ExecutionOption, Operation, OperationSpec
    from lowtime.solver import PhillipsDessouky
    from networkx import DiGraph

    specs = {}
    for choices in dict.fromkeys(curves):
        options = [ExecutionOption(c.units, 1, c.option.cost, i) for i, c in enumerate(choices)]
        specs[choices] = OperationSpec(CandidateExecutionOptions(options), _Curve(choices))
    graph = DiGraph()
    for node, choices in enumerate(curves):
        graph.add_node(node, op=Operation(specs[choices]))
    graph.add_edges_from((before, node) for node, edges in enumerate(inputs) for before, _ in edges)
    add_source_node(graph, len(curves))
    add_sink_node(graph, len(curves) + 1)
    graph.graph["source_node"], graph.graph["sink_node"] = len(curves), len(curves) + 1
    yield [choices[-1].option for choices in curves]
    for _ in PhillipsDessouky(graph).run():
        yield [choices[graph.nodes[node]["op"].assigned_knob].option for node, choices in enumerate(curves)]


def _point(insts: Sequence[Instruction], inputs: Inputs, options: Sequence[Option]) -> FrontierPoint:
    """Return the point with exact times; every instruction has one of its options, none is between two."""
    exact = [exact_duration(option.duration, inst) for inst, option in zip(insts, options, strict=True)]
    units, scale = in_whole_units(exact)
    time = max(TaskGraph.of(units, inputs).earliest().ends_us) / scale
    return FrontierPoint(time, sum(option.cost for option in options), tuple(options))
