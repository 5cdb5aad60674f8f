"""A pipeline stage made of functions: one runs the forward; another one, which the user may give, runs the backward.

    received ────▶ cut ────▶ fwd_fn ────▶ output ────▶ cut ────▶ what the next stage gets
    its gradient ◀─────── bwd_fn(output, its gradient) ◀──────── gradient received

The pipeline sees one autograd function instead of the stage's graph; the backward of this function calls `bwd_fn`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn

from rota.runtime import spmd
from rota.runtime.messages import over_tensors
from rota.torch_internals import tree_flatten, tree_unflatten

Forward = Callable[[Any], Any]
Backward = Callable[[Any, Any], Any]


@final
class FunctionStage(nn.Module):
    """A stage that runs functions.

    It is called with the output of the previous stage, if there is one, and with this stage's own inputs.

    Args:
        is_last: Whether this is the last stage, which returns a loss.
        group: The ranks over which tensors are sent in slices, one per rank. None: tensors are sent whole.

    Attributes:
        fwd_fn: The forward; set before each step.
        bwd_fn: The backward, or None for autograd's; set before each step.
        output: The output of the last micro-batch, detached.
    """

    def __init__(self, is_last: bool, group: spmd.Group) -> None:
        super().__init__()
        self.is_last, self.group = is_last, group
        self.fwd_fn: Forward | None = None
        self.bwd_fn: Backward | None = None
        self.output: Any = None

    def forward(self, *values: Any) -> Any:
        """Run `fwd_fn` on (output of the previous stage, own inputs), or on (own inputs,)."""
        *received, own_inputs = values
        arrived, layout = tree_flatten([self._gathered(value) for value in received])
        gradients: dict[int, torch.Tensor] = {}  # of `arrived`, by position
        entered = [_entered(value, i, gradients) for i, value in enumerate(arrived)]
        inputs: list[Any] = []
        for value in tree_unflatten(entered, layout):  # several tensors over one boundary are several inputs
            inputs += value if isinstance(value, tuple | list) else [value]
        inputs += own_inputs
        assert self.fwd_fn is not None, "a step sets it first"
        output = self.fwd_fn(inputs[0] if len(inputs) == 1 else inputs)
        self.output = over_tensors(torch.Tensor.detach, output)
        if torch.is_grad_enabled():
            output = self._with_backward(arrived, gradients, output)
        return output if self.is_last else self._sliced(output)

    def _with_backward(self, arrived: list[Any], gradients: dict[int, torch.Tensor], output: Any) -> Any:
        """Return the output as the result of one autograd function, whose backward runs the stage's backward."""
        values, layout = tree_flatten(output)
        outgoing = [i for i, value in enumerate(values) if _needs_gradient(value)]
        incoming = [i for i, value in enumerate(arrived) if _needs_gradient(value)]
        if not outgoing:
            return output

        def run_backward(received: tuple[torch.Tensor, ...]) -> list[torch.Tensor | None]:
            with torch.enable_grad():
                if self.bwd_fn is None:
                    torch.autograd.backward([values[i] for i in outgoing], None if self.is_last else received)
                elif self.is_last:  # a loss: the gradient that the pipeline gives it includes the micro-batch's weight
                    self.bwd_fn(output, None)
                else:
                    by_position = dict(zip(outgoing, received, strict=True))
                    self.bwd_fn(output, tree_unflatten([by_position.get(i) for i in range(len(values))], layout))
            return [gradients.get(i) for i in incoming]

        sent = [*values]
        results = _apply(run_backward, [values[i] for i in outgoing], [arrived[i] for i in incoming])
        for i, value in zip(outgoing, results, strict=True):
            sent[i] = value
        return tree_unflatten(sent, layout)

    def _sliced(self, value: Any) -> Any:
        """Return a value with this rank's slices for its tensors; integers and what does not divide stay whole."""
        group = self.group
        if group is None:
            return value

        def own_slice(tensor: torch.Tensor) -> Any:
            length, remainder = divmod(tensor.numel(), group.size())
            if remainder or not tensor.is_floating_point():
                return tensor
            part = spmd.copy_to_ranks(tensor, group).flatten().narrow(0, group.rank() * length, length)
            return {_SHAPE: tuple(tensor.shape), _SLICE: part}

        return over_tensors(own_slice, value)

    def _gathered(self, value: Any) -> Any:
        if isinstance(value, dict) and _SLICE in value:
            return spmd.gather_from_ranks(value[_SLICE], self.group, dim=0).view(value[_SHAPE])
        if isinstance(value, dict):
            return {key: self._gathered(item) for key, item in value.items()}
        return type(value)(map(self._gathered, value)) if isinstance(value, tuple | list) else value


_SHAPE, _SLICE = "shape of the whole", "slice of the whole"  # keys of a message


class _Cut(torch.autograd.Function):
    """Joins two graphs: returns the values unchanged; its backward calls `run_backward` with their gradients.

    `run_backward` returns the gradients of the tensors that follow `values`. The values are passed as a list, so that
    autograd does not treat the results as views: code may write into them.
    """

    @staticmethod
    def forward(ctx: Any, run_backward: Any, values: list[torch.Tensor], *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.run_backward = run_backward
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return (None, None, *ctx.run_backward(gradients), None)


def _apply(run_backward: Callable[..., Any], values: list[torch.Tensor], incoming: list[torch.Tensor]) -> Any:
    """Return the values as results of a `_Cut` of `incoming`."""
    anchor = torch.empty(0, requires_grad=True)  # the inputs of a first stage need no gradient
    apply: Any = _Cut.apply  # has no types
    return apply(run_backward, [value.detach() for value in values], *incoming, anchor)


def _entered(value: Any, position: int, gradients: dict[int, torch.Tensor]) -> Any:
    """Return what arrived as the start of the stage's own graph; its gradient is stored in `gradients[position]`."""
    if not _needs_gradient(value):
        return value

    def accumulate(received: tuple[torch.Tensor, ...]) -> list[torch.Tensor | None]:
        previous = gradients.get(position)
        gradients[position] = received[0] if previous is None else previous + received[0]
        return []

    return _apply(accumulate, [value], [])[0]


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
