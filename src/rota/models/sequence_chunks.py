"""Samples in chunks along their length: attention that reads keys and values of the chunks before.

    k, v = rota.with_earlier_chunks(k, v)      chunk 2: k of chunks 0, 1 and 2, joined; outside of such steps: k itself

Attention is the only place where a causal model reads other positions, so this, and the number of the first position,
is all that it needs to know of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, final

import torch

from rota.core.errors import PipelineError
from rota.torch_internals import is_in_backward, version_of


@final
@dataclass(slots=True)
class Chunk:
    """The forward of a chunk in one stage; a context manager around it.

    Attributes:
        start: Positions of the sample before this chunk.
        earlier: For each earlier chunk what it passed on, call by call.
        enter: What stands in for a value of an earlier chunk, in the forward.
        made: What this chunk passes on, call by call, each with its version.
    """

    start: int = 0
    earlier: Sequence[Sequence[torch.Tensor]] = ()
    enter: Callable[[torch.Tensor], torch.Tensor] = lambda value: value
    made: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    #: The one that runs. Not a context variable: backwards on accelerators have threads of their own.
    running: ClassVar[Chunk | None] = None
    #: Whether a step with chunks runs, so that a forward inside of a backward would be one of a chunk.
    step_has_chunks: ClassVar[bool] = False

    def __enter__(self) -> Chunk:
        Chunk.running = self
        return self

    def __exit__(self, *_: object) -> None:
        Chunk.running = None

    def join(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        """The next call's values of all chunks up to this one."""
        call = len(self.made)
        self.made.append((value, version_of(value)))
        if any(call >= len(passed_on) for passed_on in self.earlier):
            raise PipelineError(
                f"rota.with_earlier_chunks gets value {call} of a chunk, but an earlier chunk of the sample had fewer; "
                f"call it equally often for every chunk"
            )
        if not self.earlier:
            return value
        return torch.cat([*(self.enter(passed_on[call]) for passed_on in self.earlier), value], dim)

    def passed_on(self) -> list[torch.Tensor]:
        """What this chunk passes on, once its forward is over. Raises PipelineError."""
        if self.earlier and len(self.earlier[0]) != len(self.made):
            raise PipelineError(
                f"rota.with_earlier_chunks got {len(self.made)} values in this chunk, but {len(self.earlier[0])} in an "
                f"earlier chunk of the sample; call it equally often for every chunk"
            )
        for value, version in self.made:
            if version_of(value) != version:
                raise PipelineError(
                    "the model writes into what it gave rota.with_earlier_chunks, which later chunks read; use an "
                    "operation that is not in place"
                )
        return [value for value, _ in self.made]


def with_earlier_chunks(*values: torch.Tensor, dim: int = -2) -> tuple[torch.Tensor, ...]:
    """Join values of this chunk, such as keys and values of attention, with those of the sample's earlier chunks.

    Gradients flow back to the chunks that made them. Where no chunk runs, as in the unsplit model, the values are
    returned as they are.

    Args:
        values: What this chunk made, such as k and v of shape [rows, heads, length, width].
        dim: The dimension of the length.

    Returns:
        For each value the joined one. The last positions are this chunk's, so a causal mask is aligned at the end:
        `torch.ones(q_length, k_length, dtype=torch.bool).tril(k_length - q_length)`.

    Raises:
        PipelineError: It is called in a backward of a step with chunks, as checkpointed blocks do, in compiled code, or
            not the same number of times for every chunk.
    """
    if Chunk.step_has_chunks and is_in_backward():
        raise PipelineError(
            "rota.with_earlier_chunks is called in a backward, as blocks in torch.utils.checkpoint do; recompute by "
            "Pipeline(recompute=…) or by R in the plan instead"
        )
    if torch.compiler.is_compiling():
        raise PipelineError(
            "rota.with_earlier_chunks is called in compiled code, which knows no chunks; do not compile"
        )
    chunk = Chunk.running
    return values if chunk is None else tuple(chunk.join(value, dim) for value in values)


def chunk_start() -> int:
    """The position in its sample of the first position of this chunk, for position embeddings; 0 without chunks."""
    return 0 if Chunk.running is None else Chunk.running.start
