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

The graphs of a stage mostly have one shape. So a graph is analysed once, by positions of its nodes (`Split`), and a
later one is only compared, node by node.
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
    apply_of,
    edges_into,
    first_saved,
    gradients_into,
    has_saved,
    has_saved_tensor_hooks,
    is_compiled_function,
    is_packed,
    release_saved,
    run_backward,
    runs_as_a_whole,
    saved_tensors,
    without_donated_buffers,
)

Gradients: TypeAlias = Sequence[torch.Tensor | None]

_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)  # what inputs hang on, so that they want a gradient


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
            for node in _walk([edge.node for edge in edges], ())[0]:
                yield from saved_tensors(node)


Links: TypeAlias = list[int] | None  # where a node's edges lead, -1: nowhere; None: the node is an end


@dataclass(slots=True)
class Split:
    """How the backward of a graph is split, by positions of its nodes in the order of `_walk`.

    `shape`: of each node its type and links. `roots`: of each root its node and which output of it. `waiting`: each
    branch that waits. `at_once`: the weights of the others. `released`: nodes that do not run again, and hold tensors.
    `is_compiled`: `torch.compile` made a node of it. `hooks`: of forks and branches, each node that saved a tensor,
    which one, and whether hooks packed it: a graph of the same shape may have hooks elsewhere.
    """

    shape: list[tuple[type, Links]]
    roots: list[tuple[int, int]]
    leads_to_inputs: bool = False
    waiting: list[_Branch] = field(default_factory=list)
    at_once: list[int] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    is_compiled: bool = False
    hooks: list[tuple[int, str, bool]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Branch:
    """What hangs on a `fork`, or where that is None, on those `roots` (by their order) that lead to no input."""

    fork: int | None
    can_wait: bool
    roots: list[int] = field(default_factory=list)
    nodes: set[int] = field(default_factory=set)
    weights: list[int] = field(default_factory=list)  # the nodes that add to a `.grad`


def input_gradients(
    roots: list[GradientEdge], gradients: Gradients, inputs: list[GradientEdge], splits: list[Split] | None = None
) -> tuple[list[torch.Tensor | None], WeightWork]:
    """The gradients of `inputs`, None where none arrives, and the work that is left for the weights.

    `inputs` are edges of tensors that `enter` returned. Where no root leads to any of them, all the work is left.
    `splits`: none, or that of an earlier graph of the stage; it gets that of this graph.
    """
    ends = {edge.node for edge in inputs}
    nodes, split = _split_as_before(roots, ends, splits or [])
    if splits is not None:
        splits[:] = [split]
    if not split.leads_to_inputs:
        return [None] * len(inputs), WeightWork([(roots, gradients, [])] if roots else [])
    into = [
        [roots[i] for i in branch.roots] if branch.fork is None else edges_into(nodes[branch.fork])
        for branch in split.waiting
    ]
    wanted = [*inputs, *(GradientEdge(nodes[i], 0) for i in split.at_once)]
    for edges in into:
        wanted += edges
    retain = bool(split.waiting)  # else autograd frees by itself, and compiled modules insist on that
    with _compiled_functions_run_once() if retain and split.is_compiled else nullcontext():
        arrived = gradients_into(wanted, roots, gradients, retain_graph=retain)
    results = iter(arrived[len(inputs) :])
    if split.at_once:
        with torch.no_grad():
            for i, gradient in zip(split.at_once, results, strict=False):
                if gradient is not None:
                    nodes[i](gradient)  # not by the engine, which has run the weight's hooks and would run them again
    parts: list[tuple[list[GradientEdge], Gradients, list[torch.Tensor]]] = []
    for branch, edges in zip(split.waiting, into, strict=True):
        pairs = [(edge, gradient) for edge in edges if (gradient := next(results)) is not None]
        if pairs:
            weights = [nodes[i].variable for i in branch.weights]
            parts.append(([edge for edge, _ in pairs], [gradient for _, gradient in pairs], weights))
    if split.released:
        release_saved([nodes[i] for i in split.released])
    return [*arrived[: len(inputs)]], WeightWork(parts)


# --- the analysis of a graph ------------------------------------------------------------------------------------------


def _walk(roots: Iterable[Node], ends: Collection[Node]) -> tuple[list[Node], list[Links]]:
    """All nodes that the roots lead to, up to `ends`, in the order in which they are seen; and the links of each."""
    nodes = [*dict.fromkeys(roots)]
    position = {node: i for i, node in enumerate(nodes)}
    links: list[Links] = []
    for node in nodes:  # the list grows meanwhile
        if node in ends:
            links.append(None)
            continue
        of_node = []
        for following, _ in node.next_functions:
            if following is None:
                of_node.append(-1)
                continue
            at = position.setdefault(following, len(nodes))
            if at == len(nodes):
                nodes.append(following)
            of_node.append(at)
        links.append(of_node)
    return nodes, links


def _split_as_before(
    roots: list[GradientEdge], ends: Collection[Node], splits: Sequence[Split]
) -> tuple[list[Any], Split]:
    """The nodes of a graph in the order of `_walk`, and how its backward is split."""
    if splits and (nodes := _nodes_in_shape(splits[0], roots, ends)) is not None:
        return nodes, splits[0]
    return _split(roots, ends)


def _nodes_in_shape(split: Split, roots: list[GradientEdge], ends: Collection[Node]) -> list[Node] | None:
    """The nodes of a graph in the order of `_walk`, if the graph has the shape that was split; None if it has not."""
    nodes = [*dict.fromkeys([root.node for root in roots])]
    position = {node: i for i, node in enumerate(nodes)}
    if [(position[root.node], root.output_nr) for root in roots] != split.roots:
        return None
    for i, (node_type, links) in enumerate(split.shape):
        node = nodes[i] if i < len(nodes) else None
        if type(node) is not node_type or (node in ends) is not (links is None):
            return None
        if node is None or links is None:
            continue
        functions = node.next_functions
        if len(functions) != len(links):
            return None
        for (following, _), link in zip(functions, links, strict=True):
            if link == len(nodes) and following is not None:
                nodes.append(following)
            elif (nodes[link] if 0 <= link < len(nodes) else None) is not following or link >= len(nodes):
                return None
    if not len(nodes) == len(split.shape) == len({*nodes}):
        return None
    return nodes if all(is_packed(nodes[i], name) is packed for i, name, packed in split.hooks) else None


def _split(roots: list[GradientEdge], ends: Collection[Node]) -> tuple[list[Node], Split]:
    nodes, links = _walk([root.node for root in roots], ends)
    position = {node: i for i, node in enumerate(nodes)}
    root_outputs = [(position[root.node], root.output_nr) for root in roots]
    split = Split([*zip(map(type, nodes), links, strict=True)], root_outputs)
    after = [[to for to in of_node or () if to >= 0] for of_node in links]
    order = _behind_first(after)
    spine: set[int] = set()
    for i in order:
        if links[i] is None or not spine.isdisjoint(after[i]):
            spine.add(i)
    split.leads_to_inputs = bool(spine)
    if not spine:
        return nodes, split
    branches = _branches(nodes, links, order, spine, split.roots)
    may_wait = {i for branch in branches for i in (*branch.nodes, branch.fork) if i is not None}
    split.hooks = [(i, name, is_packed(nodes[i], name)) for i in may_wait if (name := first_saved(nodes[i]))]
    split.waiting = [branch for branch in branches if branch.can_wait and branch.weights]
    split.at_once = [weight for branch in branches if not branch.can_wait for weight in branch.weights]
    if split.waiting:
        runs_again = {i for branch in split.waiting for i in (*branch.nodes, branch.fork)}
        runs_again |= {split.roots[i][0] for branch in split.waiting for i in branch.roots}
        split.released = [i for i, node in enumerate(nodes) if i not in runs_again and has_saved(node)]
        split.is_compiled = any(map(is_compiled_function, nodes))
    return nodes, split


def _behind_first(after: list[list[int]]) -> list[int]:
    """All positions, each behind those that it leads to."""
    order: list[int] = []
    seen = [False] * len(after)
    for root in range(len(after)):
        stack = [root]
        while stack:
            i = stack[-1]
            if seen[i]:
                stack.pop()
                continue
            ahead = [to for to in after[i] if not seen[to]]
            if ahead:
                stack += ahead
            else:
                seen[i] = True
                order.append(i)
    return order


def _branches(
    nodes: list[Node], links: list[Links], order: list[int], spine: Collection[int], roots: list[tuple[int, int]]
) -> list[_Branch]:
    """All branches, that of roots first."""
    # Once each, as the gradients of roots that are the same arrive together.
    off_spine = {root: roots.index(root) for root in roots if root[0] not in spine}
    begun = [(_Branch(None, can_wait=True, roots=[*off_spine.values()]), [node for node, _ in off_spine])]
    for i in order:
        if i in spine:
            heads = [to for to in links[i] or () if to >= 0 and to not in spine]
            if heads:
                can_wait = not runs_as_a_whole(nodes[i]) and not has_saved_tensor_hooks(nodes[i])
                begun.append((_Branch(i, can_wait), heads))
    branch_of: dict[int, _Branch] = {}
    for branch, heads in begun:
        while heads:
            i = heads.pop()
            other = branch_of.setdefault(i, branch)
            if other is not branch:  # it is another branch's already, so neither can wait
                branch.can_wait = other.can_wait = False
            elif i not in branch.nodes:
                branch.nodes.add(i)
                if accumulates_gradient(nodes[i]):
                    branch.weights.append(i)
                if has_saved_tensor_hooks(nodes[i]):
                    branch.can_wait = False
                heads += [to for to in links[i] or () if to >= 0]
    return [branch for branch, _ in begun]


@contextmanager
def _compiled_functions_run_once() -> Iterator[None]:
    """Around a backward that keeps the graph but runs what `torch.compile` made once, so that it may reuse its buffers.

    Compiled functions refuse to run in a graph that is kept, by a configuration of the thread that runs them: so
    this thread runs them, also those on an accelerator.
    """
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


_enter = apply_of(_Enter)
