"""A pipeline stage made of functions: one runs it forward, another, which may be anyone's, runs it backward.

    received ────▶ cut ────▶ fwd_fn ────▶ output ────▶ cut ────▶ what the next stage gets
    its gradient ◀─────── bwd_fn(output, its gradient) ◀──────── gradient received

The pipeline sees one autograd function in place of the stage's graph, whose backward calls `bwd_fn`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from rota.runtime import spmd
from rota.runtime.gradients import over_tensors

Forward = Callable[[Any], Any]
Backward = Callable[[Any, Any], Any]


@final
class FunctionStage(nn.Module):
    """`fwd_fn` and `bwd_fn` are set before each step; `output` is what the last micro-batch made.

    Called with (what the stage before made, this stage's own inputs), or with the latter alone. With a `group`,
    tensors travel in slices, one on each of its ranks.
    """

    def __init__(self, is_last: bool, group: spmd.Group) -> None:
        super().__init__()
        self.is_last, self.group = is_last, group
        self.fwd_fn: Forward = _not_set
        self.bwd_fn: Backward | None = None
        self.output: Any = None

    def forward(self, *given: Any) -> Any:
        *received, extra = given
        arrived, layout = tree_flatten([self._gathered(value) for value in received])
        gradients: dict[int, torch.Tensor] = {}  # of what arrived, by position
        entered = [_entered(value, i, gradients) for i, value in enumerate(arrived)]
        inputs = [*_spread(tree_unflatten(entered, layout)), *extra]
        output = self.fwd_fn(inputs[0] if len(inputs) == 1 else inputs)
        self.output = over_tensors(torch.Tensor.detach, output)
        if torch.is_grad_enabled():
            output = self._cut_off(arrived, gradients, output)
        return output if self.is_last else self._sliced(output)

    def _cut_off(self, arrived: list[Any], gradients: dict[int, torch.Tensor], output: Any) -> Any:
        """The output, with one autograd function behind it that runs the stage's backward."""
        values, layout = tree_flatten(output)
        wanting = [i for i, value in enumerate(values) if _wants_gradient(value)]
        entering = [i for i, value in enumerate(arrived) if _wants_gradient(value)]
        if not wanting:
            return output

        def run_backward(received: tuple[torch.Tensor, ...]) -> list[torch.Tensor | None]:
            with torch.enable_grad():
                if self.bwd_fn is None:
                    torch.autograd.backward([values[i] for i in wanting], None if self.is_last else received)
                elif self.is_last:  # a loss: the pipeline's own gradient of it has the micro-batch's share in it
                    self.bwd_fn(output, None)
                else:
                    of = dict(zip(wanting, received, strict=True))
                    self.bwd_fn(output, tree_unflatten([of.get(i) for i in range(len(values))], layout))
            return [gradients.get(i) for i in entering]

        sent = [*values]
        made = _apply(run_backward, [values[i] for i in wanting], [arrived[i] for i in entering])
        for i, value in zip(wanting, made, strict=True):
            sent[i] = value
        return tree_unflatten(sent, layout)

    def _sliced(self, value: Any) -> Any:
        """Each tensor as this rank's slice of it, where it divides."""
        group = self.group
        if group is None:
            return value

        def own(tensor: torch.Tensor) -> Any:
            length, left = divmod(tensor.numel(), group.size())
            if left or not tensor.is_floating_point():
                return tensor
            part = spmd.copy_to_ranks(tensor, group).flatten().narrow(0, group.rank() * length, length)
            return {_SHAPE: tuple(tensor.shape), _SLICE: part}

        return over_tensors(own, value)

    def _gathered(self, value: Any) -> Any:
        if isinstance(value, dict) and _SLICE in value:
            return spmd.gather_from_ranks(value[_SLICE], self.group, dim=0).view(value[_SHAPE])
        if isinstance(value, dict):
            return {key: self._gathered(item) for key, item in value.items()}
        return type(value)(map(self._gathered, value)) if isinstance(value, tuple | list) else value


_SHAPE, _SLICE = "shape of the whole", "slice of the whole"


class _Cut(torch.autograd.Function):
    """Where two graphs meet: the values as they are; backward hands their gradients to `run_backward`, which answers
    with those of what entered. Values that are not given one by one are taken for no views: one may write into them.
    """

    @staticmethod
    def forward(ctx: Any, run_backward: Any, values: list[torch.Tensor], *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.run_backward = run_backward
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return (None, None, *ctx.run_backward(gradients), None)


def _apply(run_backward: Callable[..., Any], values: list[torch.Tensor], entering: list[torch.Tensor]) -> Any:
    anchor = torch.empty(0, requires_grad=True)  # a first stage's inputs want no gradient
    return _Cut.apply(run_backward, [value.detach() for value in values], *entering, anchor)  # type: ignore[no-untyped-call]


def _entered(value: Any, position: int, gradients: dict[int, torch.Tensor]) -> Any:
    """What arrived, at the beginning of the stage's own graph, which leaves its gradient under `position`."""
    if not _wants_gradient(value):
        return value

    def keep(received: tuple[torch.Tensor, ...]) -> list[torch.Tensor | None]:
        before = gradients.get(position)
        gradients[position] = received[0] if before is None else before + received[0]
        return []

    return _apply(keep, [value], [])[0]


def _spread(received: list[Any]) -> list[Any]:
    """Several tensors over a boundary are several inputs."""
    return [item for value in received for item in (value if isinstance(value, tuple | list) else (value,))]


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _not_set(inputs: Any) -> Any:  # noqa: ARG001
    raise AssertionError("a step sets fwd_fn first")
