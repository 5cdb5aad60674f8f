"""A stage's backward in two: the gradients of its inputs now (I), those of its weights later (W).

    output ─▶ linear ─▶ tanh ─▶ linear ─▶ input     nodes of autograd's graph, ─▶ where gradients go: the *spine*
                └▶ weight, bias   └▶ weight, bias   the *branches*: what leads to no input

I runs the spine for only the inputs, and notes the gradients that come into each *fork*, a spine node with a branch.
W runs each fork once more, for its branch alone: of a node's gradients, autograd computes those that are asked for.
Between the two, only such forks and branches keep what autograd saved for them.

Some branches cannot wait. I runs them too, and adds to their weights' `.grad` at once:
- of a custom `autograd.Function`: it computes all its gradients or none, and shall do so once;
- of nodes whose saved tensors come from hooks: W would recompute a checkpointed block once more;
- those that share a weight: from the upper fork, autograd would run the spine down to the lower one again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import GradientEdge, Node

from rota.torch_internals import (
    accumulates_gradient,
    edges_into,
    gradients_into,
    has_saved_tensor_hooks,
    is_compiled_function,
    release_saved,
    run_backward,
    runs_as_a_whole,
    saved_tensors,
    without_donated_buffers,
)

Gradients: TypeAlias = Sequence[torch.Tensor | None]

_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)  # what inputs hang on, so that they want a gradient


@dataclass(slots=True, eq=False)
class _Branch:
    """What hangs on a fork, or on the roots that lead to no input; `edges` are where gradients come into it."""

    edges: list[GradientEdge]
    can_wait: bool
    nodes: dict[Node, None] = field(default_factory=dict)
    weights: list[Any] = field(default_factory=list)  # the nodes that add to a `.grad`


@dataclass(slots=True)
class WeightWork:
    """What I leaves for W: backwards, each from edges with their gradients to some weights (none: to all)."""

    parts: list[tuple[list[GradientEdge], Gradients, list[torch.Tensor]]]

    def run(self) -> None:
        """Add the gradients to the weights' `.grad`."""
        while self.parts:
            edges, gradients, weights = self.parts.pop()
            run_backward(edges, gradients, weights)

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that is kept for it: gradients, and what autograd saved (as far as it is not packed by hooks)."""
        for edges, gradients, _ in self.parts:
            yield from (gradient for gradient in gradients if gradient is not None)
            for node in _explore([edge.node for edge in edges], ()):
                yield from saved_tensors(node)


def input_gradients(
    roots: list[GradientEdge], gradients: Gradients, inputs: list[GradientEdge]
) -> tuple[Gradients, WeightWork]:
    """The gradients of `inputs`, None where none arrives, and the work that is left for the weights.

    `inputs` are edges of tensors that `enter` returned. Where no root leads to any of them, all the work is left.
    """
    ends = {edge.node for edge in inputs}
    after = _explore([root.node for root in roots], ends)
    spine: set[Node] = set()
    for node, following in after.items():
        if node in ends or not spine.isdisjoint(following):
            spine.add(node)
    if not spine:
        return [None] * len(inputs), WeightWork([(roots, gradients, [])] if roots else [])
    branches = _branches(after, spine, ends, roots)
    waiting = [branch for branch in branches if branch.can_wait and branch.weights]
    at_once = [weight for branch in branches if not branch.can_wait for weight in branch.weights]
    into = [GradientEdge(weight, 0) for weight in at_once] + [edge for branch in waiting for edge in branch.edges]
    retain = bool(waiting)  # else autograd frees by itself, and compiled modules insist on that
    with _compiled_functions_run_once(after) if retain else nullcontext():
        results = iter(gradients_into(inputs + into, roots, gradients, retain_graph=retain))
    of_inputs: Gradients = [next(results) for _ in inputs]
    with torch.no_grad():
        for weight in at_once:
            if (gradient := next(results)) is not None:
                weight(gradient)  # not by the engine, which has run the weight's hooks and would run them again
    then = [_arrived(branch.edges, results) for branch in waiting]
    if not waiting:
        return of_inputs, WeightWork([])
    kept = {node for branch in waiting for node in (*branch.nodes, *(edge.node for edge in branch.edges))}
    release_saved(node for node in after if node not in kept)
    weights = ([weight.variable for weight in branch.weights] for branch in waiting)
    return of_inputs, WeightWork([(*arrived, to) for arrived, to in zip(then, weights, strict=True) if arrived[0]])


def _arrived(edges: list[GradientEdge], results: Iterator[torch.Tensor | None]) -> tuple[list[GradientEdge], Gradients]:
    """Those edges that got a gradient, and their gradients; takes one for each edge."""
    pairs = [(edge, gradient) for edge in edges if (gradient := next(results)) is not None]
    return [edge for edge, _ in pairs], [gradient for _, gradient in pairs]


def _explore(roots: list[Node], ends: Collection[Node]) -> dict[Node, list[Node]]:
    """All nodes that the roots lead to, up to `ends`; each with the nodes that its edges lead to, and behind those."""
    following: dict[Node, list[Node]] = {}
    after: dict[Node, list[Node]] = {}
    stack = list(roots)
    while stack:
        node = stack[-1]
        if node in following:
            after.setdefault(node, following[node])
            stack.pop()
        else:
            following[node] = [] if node in ends else [to for to, _ in node.next_functions if to is not None]
            stack += [to for to in following[node] if to not in following]
    return after


def _branches(
    after: dict[Node, list[Node]], spine: Collection[Node], ends: Collection[Node], roots: list[GradientEdge]
) -> list[_Branch]:
    """All branches, those of roots first."""
    off_spine = {(root.node, root.output_nr): root for root in roots if root.node not in spine}
    begun = [(_Branch([*off_spine.values()], can_wait=True), [node for node, _ in off_spine])]
    for node, following in after.items():
        if node in spine and node not in ends:
            heads = [to for to in following if to not in spine]
            if heads:
                can_wait = not runs_as_a_whole(node) and not has_saved_tensor_hooks(node)
                begun.append((_Branch(edges_into(node), can_wait), heads))
    branch_of: dict[Node, _Branch] = {}
    for branch, heads in begun:
        _grow(branch, heads, after, branch_of)
    return [branch for branch, _ in begun]


def _grow(branch: _Branch, heads: list[Node], after: dict[Node, list[Node]], branch_of: dict[Node, _Branch]) -> None:
    """Give the branch all that `heads` lead to; where that is another's already, neither can wait."""
    while heads:
        node = heads.pop()
        other = branch_of.setdefault(node, branch)
        if other is not branch:
            branch.can_wait = other.can_wait = False
        elif node not in branch.nodes:
            branch.nodes[node] = None
            if accumulates_gradient(node):
                branch.weights.append(node)
            if has_saved_tensor_hooks(node):
                branch.can_wait = False
            heads += after[node]


@contextmanager
def _compiled_functions_run_once(nodes: Iterable[Node]) -> Iterator[None]:
    """Around a backward that keeps the graph but runs what `torch.compile` made once, so that it may reuse its buffers.

    Compiled functions refuse to run in a graph that is kept, by a configuration of the thread that runs them: so
    this thread runs them, also those on an accelerator.
    """
    if not any(map(is_compiled_function, nodes)):
        yield
        return
    with without_donated_buffers(), torch.autograd.set_multithreading_enabled(False):
        yield


# --- inputs -----------------------------------------------------------------------------------------------------------


class _Enter(torch.autograd.Function):
    """Gives a tensor a place in the graph where its gradient is picked up; that never runs.

    A leaf's own node would keep the leaf, and a view would forbid to write into it.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, box: list[torch.Tensor]) -> torch.Tensor:  # noqa: ARG004
        return box.pop()


def enter(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as an input of a stage, kept alive by nothing but its readers."""
    entered: torch.Tensor = _enter(_ANCHOR, [tensor.detach()])
    return entered


_enter: Any = _Enter.apply
