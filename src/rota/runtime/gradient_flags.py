"""Which gradients of the values between ranks there are: a value that nobody used has none, rather than zeros."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import final

import torch

from rota.core.errors import PipelineError
from rota.models.stage_edges import StageEdge
from rota.runtime.gradients.split_backward import Gradients
from rota.runtime.messages import Format


@final
class GradientFlags:
    """What one rank knows of the gradients on its edges.

    run that learns     a flag per tensor, then the gradients     of every edge
    later runs          a flag per tensor, then the gradients     of the edges on which one was missing in that run
                        the gradients                             of all others

    Zeros travel in the place of a missing gradient, as its receiver has a buffer for it already. Both ranks of an edge
    know whether its messages have flags.
    """

    def __init__(self) -> None:
        #: Whether a run that learns has ended since the last run that failed.
        self.are_known = False
        self._on_all_edges = False
        self._edges: set[int] = set()
        self._zeros: Counter[tuple[int, int]] = Counter()  # by edge and tensor, those sent without a flag

    def begin(self, learns: bool) -> None:
        """A new run that trains."""
        self._on_all_edges = learns
        self._zeros.clear()
        if learns:
            self.are_known = False
            self._edges.clear()

    def travel(self, edge: int, num_gradients: int) -> bool:
        """Whether the gradients of a message have flags."""
        return num_gradients > 0 and (self._on_all_edges or edge in self._edges)

    def to_send(self, edge: int, gradients: Gradients) -> torch.Tensor:
        """The flags to send before the gradients."""
        are_present = [gradient is not None for gradient in gradients]
        if not all(are_present):
            self._edges.add(edge)
        return torch.tensor(are_present, dtype=torch.uint8, device="cpu")

    def note_zeros(self, edge: int, gradients: Gradients) -> None:
        """Some of these gradients are missing, but have no flags."""
        self._zeros.update((edge, i) for i, gradient in enumerate(gradients) if gradient is None)

    def read(self, edge: int, flags: torch.Tensor, gradients: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """The received gradients, None for those that are missing."""
        are_present = flags.tolist()
        if not all(are_present):
            self._edges.add(edge)
        return [gradient if is_present else None for gradient, is_present in zip(gradients, are_present, strict=True)]

    def end(self, edges: Sequence[StageEdge], num_sent: Counter[int]) -> None:
        """The run has ended. `edges`: their stages; `num_sent`: by edge, the messages with gradients sent here.

        Raises PipelineError if zeros were sent for a tensor in all micro-batches.
        """
        for (edge, i), num_zeros in self._zeros.items():
            if num_zeros == num_sent[edge]:
                source, target, *_ = edges[edge]
                raise PipelineError(
                    f"what stage {source} sends to stage {target} got no gradient in any micro-batch of this step "
                    f"(tensor {i} of those that want one), unlike in an earlier step, so weights would get gradients "
                    f"of zeros, not None; if it is not used in each step, use Pipeline(…, dynamic_shapes=True)"
                )
        self.are_known = True


def with_zeros(gradients: Gradients, form: Format, device: torch.device) -> list[torch.Tensor]:
    """The gradients that travel."""
    return [
        torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
        for gradient, (shape, dtype) in zip(gradients, form.gradients, strict=True)
    ]
