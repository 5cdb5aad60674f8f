"""The log of what a constructor did to tensors without memory, in order, and its replay.

number   0                      1                    2
         empty(50257, 768)      ones(1024, 1024)
         uniform_(#0, state a)
                                                     tril(#1)
         normal_(#0, state b)

To make #0 again, only its last line is needed, with the generator in state b; to make #2, those of #1 and #2.
Tensors are identified by their storages, since a parameter, its `.data` and views of them share one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, final
from weakref import WeakSet, WeakValueDictionary

import torch

from rota.errors import PipelineError
from rota.torch_internals import mark_of, mark_storage, tree_flatten, tree_unflatten

Reals = dict[int, torch.UntypedStorage]  # by the storage's number


class Region(NamedTuple):
    """A tensor as a part of a numbered storage."""

    number: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of a tensor of this size without gaps."""
        return math.prod(self.size) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: torch.Tensor, number: int) -> Region:
        """Where `tensor`, which is deferred, is in its storage."""
        return cls(number, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The same part of a storage with memory."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: `arguments` has a Region for each deferred tensor; `outputs` those on new storages."""

    function: Callable[..., Any]
    arguments: list[Any]
    structure: Any
    outputs: list[Region | None]
    reads: frozenset[int]
    writes: frozenset[int]
    device: torch.device
    default_dtype: torch.dtype
    is_random: bool
    #: The state of its generator before it drew. None: it draws nothing, or has not drawn.
    state: torch.Tensor | None

    def run(self, reals: Reals) -> None:
        """Run the operation with memory, and add the storages that it makes to `reals`."""
        for region in self.arguments:
            if isinstance(region, Region) and region.number not in reals:  # it is overwritten
                reals[region.number] = torch.UntypedStorage(region.num_bytes, device=self.device)  # type: ignore[no-untyped-call]
        filled = [leaf.on(reals[leaf.number]) if isinstance(leaf, Region) else leaf for leaf in self.arguments]
        args, kwargs = tree_unflatten(filled, self.structure)
        with _default_dtype(self.default_dtype), _generator_in(self.state, args, kwargs):
            made, _ = tree_flatten(self.function(*args, **kwargs))
        for region, tensor in zip(self.outputs, made, strict=True):
            if region is not None:
                reals[region.number] = _laid_out(tensor, region)


def _laid_out(tensor: torch.Tensor, region: Region) -> torch.UntypedStorage:
    """The storage of what an operation made, with the strides that it had on the meta device."""
    if (tuple(tensor.stride()), tensor.storage_offset()) != (region.stride, region.offset):
        tensor = torch.empty_strided(region.size, region.stride, dtype=region.dtype, device=tensor.device).copy_(tensor)
    return tensor.untyped_storage()


@final
@dataclass(eq=False, slots=True, weakref_slot=True)
class Deferred:
    """The mark of a storage without memory: its number in `log`, and the device where it will be."""

    log: Log
    number: int
    device: torch.device
    #: Its memory as of operation number `written`, if it is kept because it may be read soon.
    real: torch.UntypedStorage | None = None
    written: int = -1

    def keep(self, real: torch.UntypedStorage, written: int) -> None:
        """Keep its memory for now."""
        self.real, self.written = real, written

    def release(self) -> None:
        """Free its memory again."""
        self.real = None


def deferred(tensor: torch.Tensor) -> Deferred | None:
    """The mark of a tensor that has no memory yet, None for all others."""
    mark = mark_of(tensor)
    return mark if isinstance(mark, Deferred) else None


@final
@dataclass(slots=True)
class Log:
    """All operations on deferred storages. `draws`: whether they drew their random numbers."""

    draws: bool
    operations: list[Operation] = field(default_factory=list)
    marks: WeakValueDictionary[int, Deferred] = field(default_factory=WeakValueDictionary)
    num_storages: int = 0

    def defer(self, made: torch.Tensor, device: torch.device) -> Region:
        """Mark the storage of `made`, a meta tensor, as deferred."""
        mark = Deferred(self, self.num_storages, device)
        self.num_storages += 1
        self.marks[mark.number] = mark
        mark_storage(made.untyped_storage(), mark)
        return Region.of(made, mark.number)

    def needed_for(self, wanted: Iterable[int]) -> tuple[list[int], set[int]]:
        """The operations that make `wanted`, in order, and the storages whose kept memory they use."""
        made: set[int] = set()  # made although kept, as their earlier values are needed too
        while True:
            chosen, kept, earlier = self._needed_for({*wanted}, made)
            if not earlier:
                return chosen, kept
            made |= earlier

    def _needed_for(self, needed: set[int], made: set[int]) -> tuple[list[int], set[int], set[int]]:
        """As `needed_for`; also the kept storages whose earlier values are needed."""
        chosen, kept, earlier = [], set[int](), set[int]()
        for index in range(len(self.operations) - 1, -1, -1):
            if not needed:
                break
            operation = self.operations[index]
            mine = needed & operation.writes
            if mine and all(number not in made and self._is_kept(number, index) for number in mine):
                needed -= mine
                kept |= mine
            elif mine:
                chosen.append(index)
                needed = (needed - operation.writes) | operation.reads
                earlier |= kept & (operation.reads | operation.writes)
        return chosen[::-1], kept, earlier

    def is_undrawn(self, index: int) -> bool:
        """Whether an operation would draw random numbers that were not drawn."""
        return self.operations[index].is_random and self.operations[index].state is None

    def _is_kept(self, number: int, written: int) -> bool:
        mark = self.marks.get(number)
        return mark is not None and mark.real is not None and mark.written == written

    def replay(self, wanted: Iterable[int], keep: WeakSet[Deferred] | None = None) -> Reals:
        """The current storages `wanted`. `keep` gets the marks of all that was made; they keep its memory."""
        return dict(self.replayed(wanted, keep))

    def replayed(
        self, wanted: Iterable[int], keep: WeakSet[Deferred] | None = None
    ) -> Iterator[tuple[int, torch.UntypedStorage]]:
        """As `replay`, each storage once it is complete: the caller may move it, and free it, before the next."""
        wanted = {*wanted}
        chosen, kept = self.needed_for(wanted)
        last_use = {n: i for i in chosen for n in self.operations[i].reads | self.operations[i].writes}
        reals: Reals = {n: real for n in kept if (real := self.marks[n].real) is not None}
        if keep is not None:
            keep.update(self.marks[number] for number in kept)
        for number in wanted - last_use.keys():
            yield number, reals.pop(number)
        for index in chosen:
            operation = self.operations[index]
            with torch.no_grad():
                operation.run(reals)
            for number in operation.reads | operation.writes:
                if keep is not None and number in operation.writes and (mark := self.marks.get(number)) is not None:
                    mark.keep(reals[number], index)
                    keep.add(mark)
                if last_use[number] == index:
                    storage = reals.pop(number)
                    if number in wanted:
                        yield number, storage
                    del storage


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _generator_in(state: torch.Tensor | None, args: Any, kwargs: Any) -> Iterator[None]:
    """Inside, the generator that an operation with these arguments draws from is in `state`."""
    if state is None:
        yield
        return
    generator = generator_of(args, kwargs)
    before = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)


class Generator(Protocol):
    """What random numbers are drawn from."""

    def get_state(self) -> torch.Tensor:
        """Its state."""

    def set_state(self, state: torch.Tensor) -> Any:
        """Continue from a state."""


@final
class _OfDevice:
    """The default generator of a device other than the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        if not hasattr(self._module, "get_rng_state"):
            raise PipelineError(
                f"PyTorch cannot read the random state of {device}, so what is drawn there cannot be drawn again; make "
                "the model on the CPU, or with deferred_init(to_load=True)"
            )

    def get_state(self) -> torch.Tensor:
        """See `Generator`."""
        state: torch.Tensor = self._module.get_rng_state(self._device)
        return state

    def set_state(self, state: torch.Tensor) -> None:
        """See `Generator`."""
        self._module.set_rng_state(state, self._device)


def generator_of(args: Any, kwargs: Any) -> Generator:
    """The generator that an operation with these arguments draws from."""
    leaves, _ = tree_flatten((args, kwargs))
    given = next((leaf for leaf in leaves if isinstance(leaf, torch.Generator)), None)
    if given is not None:
        return given
    device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), kwargs.get("device"))
    return torch.default_generator if device is None or device.type in ("cpu", "meta") else _OfDevice(device)
