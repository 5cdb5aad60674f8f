"""Whether a rank knows the layouts of what travels between stages, so that only tensors need to be sent.

Layouts          of one plan: those of its last run, or, with the sizes of its micro-batches, those seen at these sizes
KnownLayouts     seen with micro-batches of any size, for all plans of a pipeline
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, final

from torch import nn

from rota.core.programs.actions import ValueKey
from rota.runtime.compute import Batch
from rota.runtime.messages import Format
from rota.runtime.microbatches import structure
from rota.runtime.precision import ambient_autocast

Size: TypeAlias = tuple[int, ...]  # such as (rows, length)

_MOST_SIZES = 4096


@final
class KnownLayouts:
    """The formats of one rank's edges, and the structure of its inputs, by the size of a micro-batch.

    The sender checks each value that it sends, so a model whose layouts depend on more is refused where they differ.
    """

    def __init__(self) -> None:
        #: Whatever else the layouts may depend on; None: it is not known any more.
        self.context: object = None
        self.formats: dict[tuple[int, Size], Format] = {}
        self.inputs: dict[Size, Any] = {}

    def forget(self) -> None:
        """Forget all layouts."""
        self.formats, self.inputs = {}, {}


@final
class Layouts:
    """Whether a rank knows the layouts of a run's messages: those of the last run, or, with `sizes`, all seen ones."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        sizes: Sequence[Size],
        known: KnownLayouts,
        keys: Iterable[ValueKey],
        formats: dict[ValueKey, Format],
    ) -> None:
        # `keys`: of the values that other ranks make or read. `formats`: what runs learn, or what is known already.
        self.formats, self.known = formats, known
        self._crossing = sorted({(edge, microbatch) for edge, _, microbatch in keys}) if sizes else []
        self._sizes, self._modules = sizes, modules
        self._parameters = [parameter for module in modules for parameter in module.parameters()]
        #: Of the last inputs, by micro-batch: their shapes, and what they held besides tensors.
        self._inputs: list[Any] = []

    def find(self, batch: Batch) -> tuple[bool, bool]:
        """Whether all layouts are known; and whether what else they depend on is as it was, for all batches."""
        context = (
            [module.training for module in self._modules],
            [parameter.requires_grad for parameter in self._parameters],
            ambient_autocast(),
        )
        is_same_context, self.known.context = context == self.known.context, context
        inputs = [*map(_structure_of, batch.inputs[:1] if batch.alike and not self._sizes else batch.inputs)]
        is_same, self._inputs = inputs == self._inputs, inputs
        if self._sizes:
            return self._find_by_sizes(), is_same_context
        return is_same and is_same_context, is_same_context

    def _find_by_sizes(self) -> bool:
        """Whether all layouts were seen at the sizes of the micro-batches; if so, they are in `formats`."""
        if any(self.known.inputs.get(size) != shapes for size, shapes in zip(self._sizes, self._inputs, strict=True)):
            return False
        seen = {(edge, False, m): self.known.formats.get((edge, self._sizes[m])) for edge, m in self._crossing}
        if None in seen.values():
            return False
        self.formats |= {key: form for key, form in seen.items() if form is not None}
        return True

    def learn(self) -> None:
        """Take note of all layouts, after a run with them."""
        if not self._sizes:
            return
        if len(self.known.inputs) > _MOST_SIZES:
            self.known.forget()
        self.known.inputs.update(zip(self._sizes, self._inputs, strict=True))
        self.known.formats.update({(edge, self._sizes[m]): self.formats[edge, False, m] for edge, m in self._crossing})


def _structure_of(value: Any) -> Any:
    """The shapes of a micro-batch's inputs, and what they hold besides tensors."""
    plain: list[Any] = []
    return structure(value, plain), plain
