"""A trace cut into stages: what runs where, what travels between them, and which parameters each owns.

Every node of the trace has a home stage: the number of active cut points called before it. Inputs, parameters and
buffers have none: they are read wherever they are used. Nor has the device or dtype of a value, which is read from the
value itself wherever it is used.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple, final

from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from rota.errors import SplitError
from rota.models.stage_edges import StageEdge
from rota.models.tracer import describe, is_cut, is_trait
from rota.models.tracing import Trace


class CutModel(NamedTuple):
    """What `Stages` is made of."""

    modules: list[nn.Module]
    edges: list[StageEdge]
    inputs: list[tuple[str, ...]]


def cut_trace(model: nn.Module, trace: Trace, active: Collection[int]) -> CutModel:
    """Stages of `model`, a new one from each active cut point on (numbers in call order)."""
    layout = _Layout(trace.graph, active)
    num_stages = len(active) + 1
    edges: list[StageEdge] = []
    modules: list[nn.Module] = []
    for stage in range(num_stages):
        targets = layout.targets(stage)
        if not targets and stage < num_stages - 1:
            name = trace.cut_names[sorted(active)[stage]]
            raise SplitError(f"nothing that stage {stage} makes before CutPoint {name} is used after it: cut elsewhere")
        edges += [StageEdge(stage, target, key if len(targets) > 1 else None) for key, target in enumerate(targets)]
        graph = layout.graph_of(stage)
        module = TracedStage(graph)
        module.training = model.training
        _furnish(module, model, graph, trace.constants)
        modules.append(module)
    return CutModel(modules, edges, [layout.inputs(stage) for stage in range(num_stages)])


class _Layout:
    """Where the nodes of a trace run, and which stages read them."""

    def __init__(self, graph: fx.Graph, active: Collection[int]) -> None:
        self._nodes = [*graph.nodes]
        self._home: dict[fx.Node, int] = {}
        self._readers: defaultdict[fx.Node, set[int]] = defaultdict(set)
        stage, num_calls = 0, 0
        for node in self._nodes:
            if is_cut(node):
                stage += num_calls in active
                num_calls += 1
            elif node.op not in ("placeholder", "get_attr") and not is_trait(node):
                self._home[node] = stage
        for node in reversed(self._nodes):  # users first: a node without a home runs where it is read
            for source in node.all_input_nodes:
                self._readers[source] |= self._stages_of(node)
        for node in filter(_works_in_place, self._nodes):
            self._refuse_shared_change(node, node.all_input_nodes[0])

    def _stages_of(self, node: fx.Node) -> set[int]:
        return {self._home[node]} if node in self._home else self._readers[node]

    def _refuse_shared_change(self, node: fx.Node, changed: fx.Node) -> None:
        stages = self._stages_of(changed) | self._stages_of(node)
        if len(stages) > 1:
            raise SplitError(
                f"{describe(node)} changes a value in place that stages {sorted(stages)} share, but each has it to "
                "itself: make a new value instead"
            )

    def targets(self, stage: int) -> list[int]:
        """The stages that read what `stage` makes."""
        return sorted({reader for node in self._made_in(stage) for reader in self._readers[node]} - {stage})

    def _made_in(self, stage: int) -> list[fx.Node]:
        return [node for node in self._nodes if self._home.get(node) == stage]

    def _parcel(self, source: int, target: int) -> list[fx.Node]:
        return [node for node in self._made_in(source) if target in self._readers[node]]

    def _placeholders(self, stage: int) -> list[fx.Node]:
        return [node for node in self._nodes if node.op == "placeholder" and stage in self._readers[node]]

    def inputs(self, stage: int) -> tuple[str, ...]:
        """Names of the model's inputs that `stage` reads."""
        return tuple(str(node.target) for node in self._placeholders(stage))

    def graph_of(self, stage: int) -> fx.Graph:
        """The graph of one stage: takes its parcels by source and its inputs, returns a parcel for each target.

        A parcel of one value is that value, a parcel of several is a tuple. A stage with several targets returns
        a tuple of parcels, and the last stage returns what the model does.
        """
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        parcels = {source: parcel for source in range(stage) if (parcel := self._parcel(source, stage))}
        arrived = {source: graph.placeholder(f"from_stage_{source}") for source in parcels}
        for node in self._placeholders(stage):
            copies[node] = graph.placeholder(str(node.target))
        for source, parcel in parcels.items():
            whole = arrived[source]
            for index, node in enumerate(parcel):
                copies[node] = whole if len(parcel) == 1 else graph.call_function(operator.getitem, (whole, index))
        for node in self._nodes:
            if node.op not in ("placeholder", "output") and stage in self._stages_of(node):
                copies[node] = graph.node_copy(node, copies.__getitem__)
                copies[node].meta.clear()
        graph.output(map_arg(self._result(stage), copies.__getitem__))
        return graph

    def _result(self, stage: int) -> Any:
        if self._home[self._nodes[-1]] == stage:
            return self._nodes[-1].args[0]
        parcels = [self._parcel(stage, target) for target in self.targets(stage)]
        values = [parcel[0] if len(parcel) == 1 else tuple(parcel) for parcel in parcels]
        return values[0] if len(values) == 1 else tuple(values)


def _works_in_place(node: fx.Node) -> bool:
    """Whether a node says that it changes its first argument: `x.add_(1)`, `torch.relu_(x)`, `inplace=True`."""
    if node.op not in ("call_method", "call_function") or not node.all_input_nodes:
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or node.kwargs.get("inplace") is True


def _furnish(stage: nn.Module, model: nn.Module, graph: fx.Graph, constants: dict[str, Tensor]) -> None:
    """Give `stage` what its graph names, the model's own objects under their own names and in the model's order."""
    order = {path: index for index, (path, _) in enumerate(model.named_modules(remove_duplicate=False))}
    named = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}

    def place(path: str) -> tuple[int, str]:
        return order.get(path, order[path.rpartition(".")[0]]), path

    for path in sorted(named, key=place):
        *steps, name = path.split(".")
        owner, original = stage, model
        for step in steps:
            original = original.get_submodule(step)
            if step not in owner._modules:
                owner.add_module(step, nn.Module())
                owner.get_submodule(step).training = original.training
            owner = owner.get_submodule(step)
        if owner is not original:  # else a module moved in whole, and brought it along
            _hang(owner, name, constants[path] if path in constants else getattr(original, name), original)


def _hang(owner: nn.Module, name: str, value: Any, original: nn.Module) -> None:
    """Register `value` at `owner` as it was at `original`; a tensor that was not registered is not saved either."""
    if isinstance(value, nn.Module):
        owner.add_module(name, value)
    elif isinstance(value, nn.Parameter):
        owner.register_parameter(name, value)
    else:
        saved = name in original._buffers and name not in original._non_persistent_buffers_set
        owner.register_buffer(name, value, persistent=saved)


@final
class TracedStage(nn.Module):
    """A stretch of a model's forward as straight-line code over modules that keep their names in the model.

    Unlike an `fx.GraphModule` it survives pickling as it is: without a second trace, and its buffers stay as they are.
    """

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__()
        code = graph.python_code(root_module="self")
        self._code = code.src
        self._imports = {name: value.__name__ for name, value in code.globals.items() if isinstance(value, ModuleType)}
        self._globals = {name: value for name, value in code.globals.items() if name not in self._imports}
        self._compile()

    def _compile(self) -> None:
        namespace = self._globals | {name: import_module(path) for name, path in self._imports.items()}
        exec(compile(self._code, f"<stage code at {id(self):#x}>", "exec"), namespace)
        self._run = namespace["forward"]

    def forward(self, *values: Any) -> Any:
        """The stage's output, given the values of its incoming edges and its inputs."""
        return self._run(self, *values)

    def extra_repr(self) -> str:
        """The code: all that a stage is besides its modules."""
        return self._code.strip()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_run"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._compile()
