"""Find out for which stages PyTorch's split of a backward into I and W is correct.

PyTorch computes the weights' gradients from the nodes where paths of weights meet paths of stage inputs, in the graph
of the outputs:

    input ──▶ ∘ ──▶ ∘ ──▶ output          I runs along this line, and keeps what enters from the right at each ∘;
              ▲     ▲                     W goes down from each ∘ to the weights
           weight  weight

A weight below no ∘ silently gets no gradient. Hooks of weights are silently ignored. The split fails if a weight is
used at several ∘ with others between them, or if an output is a view.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from rota.torch_internals import has_accumulation_hooks, is_custom_function, is_view

Node = Any  # torch.autograd.graph.Node has no type for next_functions


def how_to_split(
    received: Sequence[Tensor], leaving: Sequence[Tensor], module: nn.Module
) -> Literal["I and W", "I", "W"]:
    """Where a stage with I and W runs its backward: in both, or whole in one of them if the split is not correct.

    `module` made `leaving` from `received`. The backward is whole in W if no input requires a gradient, else whole in
    I, which sends it.
    """
    inputs = {get_gradient_edge(tensor).node for tensor in received if tensor.requires_grad}
    if not inputs:
        return "W"
    outputs = [tensor for tensor in leaving if tensor.requires_grad]
    graph = _nodes(get_gradient_edge(tensor).node for tensor in outputs)
    uses = [node for readers in graph.values() for node in readers]
    weights = {get_gradient_edge(weight).node for weight in module.parameters() if weight.requires_grad}
    from_inputs = _reached(inputs, graph)
    trusted = (
        all(get_gradient_edge(tensor).node in from_inputs for tensor in outputs)
        and not any(map(is_view, outputs))
        and all(len(graph.get(weight, ())) <= 1 for weight in weights)
        and not any(map(has_accumulation_hooks, module.parameters()))
        # The backward of a user's own function would run up to three times.
        and not any(map(is_custom_function, uses))
    )
    return "I and W" if trusted else "I"


def _nodes(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """All nodes of the graph above the roots, each with the nodes from which it gets gradients."""
    readers: dict[Node, list[Node]] = {root: [] for root in roots}
    waiting = list(readers)
    while waiting:
        node = waiting.pop()
        for source, _ in node.next_functions:
            if source is not None:
                if source not in readers:
                    readers[source] = []
                    waiting.append(source)
                readers[source].append(node)
    return readers


def _reached(starts: Iterable[Node], readers: dict[Node, list[Node]]) -> set[Node]:
    """The nodes on the way from the starts to the roots."""
    reached: set[Node] = set()
    waiting = list(starts)
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting.extend(readers.get(node, ()))
    return reached
