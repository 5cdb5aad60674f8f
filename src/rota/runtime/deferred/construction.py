"""Running a model's constructor without memory for its large tensors, but with the same random numbers.

A large tensor that is made here is a meta tensor with a mark. Operations on it are noted in a log, and run on the meta
device, so that shapes are right. Its random numbers are drawn into memory that is freed again, so the generator
advances as usual, and the log has its state from before. If the constructor reads values of such a tensor (`.item()`,
`if (x > 2).any()`), the log is replayed to make them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from mmap import mmap
from typing import Any, final
from weakref import WeakSet

import torch
from torch.overrides import TorchFunctionMode

from rota.errors import PipelineError
from rota.models.replacing import replace
from rota.runtime.deferred import known_draws
from rota.runtime.deferred.known_draws import KnownDraws
from rota.runtime.deferred.log import Deferred, Generator, Log, Operation, Region, deferred, generator_of
from rota.torch_internals import (
    TorchDispatchMode,
    takes_device,
    tensors_anywhere,
    tree_flatten,
    tree_unflatten,
    without_dispatch_modes,
    written_arguments,
)

SMALL_BYTES = 64 * 1024  # a new tensor of fewer bytes gets memory at once, so that constructors can read it
_META = torch.device("meta")
_NAMED = (torch.Tensor, torch.Generator)  # arguments that are known by other means when draws are compared
_REMEDY = "make this model without deferred_init, or do this after it"
_READS_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
#: Operations that write all of their first argument and read nothing.
_FILLS = frozenset(
    f"aten.{name}"
    for name in (
        *("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_"),
        *("fill_", "zero_"),
    )
)


@contextmanager
def deferring(draws: bool) -> Iterator[None]:
    """Inside the context, large tensors are made without memory."""
    log = Log(draws)
    known = known_draws.of_this_run() if draws else None
    try:
        with _Recorder(log, known), _AsOnTheirDevice():
            yield
        if known is not None:
            known.save()
    finally:
        for mark in log.marks.values():
            mark.release()


@final
class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, log: Log, known: KnownDraws | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log, self._known = log, known
        self._drawn: WeakSet[Deferred] = WeakSet()  # those whose memory is kept: the one drawn last,
        self._read: WeakSet[Deferred] = WeakSet()  # and those made for the last read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        tensors = [*tensors_anywhere((args, kwargs))]
        if not any(map(deferred, tensors)):
            return func(*args, **kwargs) if tensors else self._make(func, args, kwargs)
        written = written_arguments(func, args, kwargs)
        if any(map(deferred, written)) and not all(map(deferred, written)):
            raise PipelineError(f"{func} writes into a small and a large tensor at once; {_REMEDY}")
        if (written and not deferred(written[0])) or any(tag in func.tags for tag in _READS_VALUES):
            return func(*self._real(args), **self._real(kwargs))
        if any(tensor.is_meta and not deferred(tensor) for tensor in tensors):
            raise PipelineError(f"{func} reads a tensor on the meta device whose values are not known; {_REMEDY}")
        if func.overloadpacket == torch.ops.aten.set_:  # it writes no values
            return func(*args, **kwargs)
        call = _Call(func, args, kwargs, written)
        if call.is_random:
            return self._draw(call)
        try:
            made = self._on_meta(func, args, kwargs)
        except NotImplementedError:
            if written:
                raise PipelineError(f"{func} cannot run on the meta device; {_REMEDY}") from None
            return func(*self._real(args), **self._real(kwargs))
        if not written and not any(isinstance(leaf, torch.Tensor) for leaf in tree_flatten(made)[0]):
            return func(*self._real(args), **self._real(kwargs))
        self._note(call, made)
        return made

    # --- new tensors ----------------------------------------------------------------------------------------------

    def _make(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Make a new tensor, without memory if it is large."""
        device = kwargs.get("device") or torch.device("cpu")
        if not takes_device(func) or device == _META:
            return func(*args, **kwargs)
        made = self._on_meta(func, args, kwargs)
        if not isinstance(made, torch.Tensor) or made.numel() * made.element_size() < SMALL_BYTES:
            return func(*args, **kwargs)
        call = _Call(func, args, kwargs, [], device)
        state = None
        if call.is_random and self._log.draws:
            generator = generator_of(args, kwargs)
            state = generator.get_state()
            self._advance(generator, call, (), lambda: func(*args, **kwargs))
        self._note(call, made, state)
        return made

    def _on_meta(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        args, kwargs = tree_unflatten([_shape_of(leaf) for leaf in leaves], structure)
        if takes_device(func):
            kwargs = {**kwargs, "device": _META} | ({"pin_memory": False} if "pin_memory" in kwargs else {})
        return func(*args, **kwargs)

    def _note(self, call: _Call, made: Any, state: torch.Tensor | None = None) -> None:
        """Add an operation to the log, unless it only makes another view."""
        outputs = [
            self._log.defer(leaf, call.device) if isinstance(leaf, torch.Tensor) and deferred(leaf) is None else None
            for leaf in tree_flatten(made)[0]
        ]
        if call.written or any(outputs):
            self._log.operations.append(call.operation(outputs, state))

    # --- random numbers -------------------------------------------------------------------------------------------

    def _draw(self, call: _Call) -> Any:
        """Draw the usual random numbers, into memory that is soon freed."""
        func, args, kwargs = call.func, call.args, call.kwargs
        state: torch.Tensor | None = None
        if not call.is_fill:
            real_args, real_kwargs = self._real((args, kwargs))
            state = generator_of(real_args, real_kwargs).get_state()
            drawn = func(*real_args, **real_kwargs)
            for tensor in call.written:  # its kept memory is outdated by this operation
                if (mark := deferred(tensor)) is not None:
                    mark.release()
            try:
                made = self._on_meta(func, args, kwargs)
            except NotImplementedError:
                return drawn
            self._note(call, made, state)
            return made
        storage: torch.UntypedStorage | None = None
        if self._log.draws:
            region = Region.of(args[0], 0)
            generator = generator_of((torch.empty(0, device=call.device),), kwargs)
            state = generator.get_state()

            def draw() -> None:
                nonlocal storage
                for other in self._drawn - self._read:
                    other.release()
                storage = _scratch(args[0].untyped_storage().nbytes(), call.device)
                func(region.on(storage), *args[1:], **kwargs)

            self._advance(generator, call, region, draw)
        self._note(call, args[0], state)
        mark = deferred(args[0])
        if storage is not None and mark is not None and call.overwrites:
            self._drawn = WeakSet((mark,))
            mark.keep(storage, len(self._log.operations) - 1)
        return args[0]

    def _advance(self, generator: Generator, call: _Call, target: tuple[Any, ...], draw: Callable[[], object]) -> None:
        """Draw what `call` draws into `target`, or only set the generator as that would, where it is known how."""
        if self._known is None or call.device.type != "cpu":
            draw()
            return
        leaves, structure = tree_flatten((call.args, call.kwargs))
        given = ["" if isinstance(leaf, _NAMED) else leaf for leaf in leaves]
        self._known.draw(generator, (call.func, target, given, structure, torch.get_default_dtype()), draw)

    # --- values that are read -------------------------------------------------------------------------------------

    def _real(self, value: Any) -> Any:
        """The arguments of an operation, with memory where they had none."""
        if not any(map(deferred, tensors_anywhere(value))):
            return value
        made, touched = with_values(self._log, value)
        for mark in self._read - touched - self._drawn:
            mark.release()
        self._read = touched
        return made


def with_values(log: Log, value: Any) -> tuple[Any, WeakSet[Deferred]]:
    """`value` with current values instead of deferred tensors, and the marks whose memory is now kept."""
    leaves, structure = tree_flatten(value)
    marks = [deferred(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    touched: WeakSet[Deferred] = WeakSet()
    with without_dispatch_modes():
        reals = log.replay({mark.number for mark in marks if mark is not None}, touched)
        made = [
            leaf if mark is None else Region.of(leaf, mark.number).on(reals[mark.number])
            for leaf, mark in zip(leaves, marks, strict=True)
        ]
    return tree_unflatten(made, structure), touched


class _Call:
    """An operation that may be added to the log."""

    def __init__(
        self, func: Any, args: Any, kwargs: dict[str, Any], written: list[torch.Tensor], device: Any = None
    ) -> None:
        self.func, self.args, self.kwargs, self.written = func, args, kwargs, written
        self._tensors = [*tensors_anywhere((args, kwargs))]
        given = kwargs.get("device")
        of_first = next((mark.device for tensor in self._tensors if (mark := deferred(tensor))), None)
        found = device or (given if given not in (None, _META) else of_first)
        assert found is not None
        self.device: torch.device = found
        self.is_random = torch.Tag.nondeterministic_seeded in func.tags
        name = str(func.overloadpacket)
        self.is_fill = name in _FILLS and len(self._tensors) == 1
        #: Whether it writes all of a storage, regardless of its content.
        self.overwrites = (self.is_fill or name == "aten.copy_") and _covers_its_storage(args[0])

    def operation(self, outputs: list[Region | None], state: torch.Tensor | None) -> Operation:
        """The log's entry. Tensors with memory are copied, since they may change."""
        leaves, structure = tree_flatten((self.args, self.kwargs))
        written = {mark.number for tensor in self.written if (mark := deferred(tensor))}
        read = self._tensors[1:] if self.overwrites else self._tensors
        return Operation(
            function=self.func,
            arguments=[self._argument(leaf) for leaf in leaves],
            structure=structure,
            outputs=outputs,
            reads=frozenset(mark.number for tensor in read if (mark := deferred(tensor))),
            writes=frozenset(written | {region.number for region in outputs if region is not None}),
            device=self.device,
            default_dtype=torch.get_default_dtype(),
            is_random=self.is_random,
            state=state,
        )

    def _argument(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            mark = deferred(leaf)
            return leaf.detach().clone() if mark is None else Region.of(leaf, mark.number)
        return self.device if leaf == _META else leaf


def _scratch(num_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """Memory that returns to the system when it is freed; `malloc` would keep it in pieces."""
    if device.type != "cpu" or not num_bytes:
        return torch.UntypedStorage(num_bytes, device=device)  # type: ignore[no-untyped-call]
    return torch.frombuffer(mmap(-1, num_bytes), dtype=torch.uint8).untyped_storage()


def _covers_its_storage(tensor: torch.Tensor) -> bool:
    strides = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    expected = 1
    for stride, length in strides:
        if length != 1 and stride != expected:
            return False
        expected *= length
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _shape_of(leaf: Any) -> Any:
    """A tensor as it is on the meta device."""
    if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=_META)
    return leaf


@final
class _AsOnTheirDevice(TorchFunctionMode):
    """Deferred tensors report the device where they will be, and can be read as lists and arrays."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        mark = deferred(args[0]) if args and isinstance(args[0], torch.Tensor) else None
        if mark is not None and func in _ABOUT_DEVICE:
            return _ABOUT_DEVICE[func](mark.device)
        if mark is not None and func == torch.Tensor.__setitem__ and isinstance(args[2], int | float | complex):
            # Otherwise the number would become a tensor on the meta device, and its value would be lost.
            args = *args[:2], torch.tensor(args[2], dtype=args[0].dtype, device=mark.device)
        if mark is not None and func in _READ_WHOLE:
            made = func(*with_values(mark.log, args)[0], **(kwargs or {}))
            if not isinstance(made, list):
                made.flags.writeable = False  # a write into the array would not reach the tensor
            return made
        if func == _SET_DATA and args[0].is_meta is not args[1].is_meta:
            replace(args[0], args[1].detach())
            return None
        return func(*args, **(kwargs or {}))


_ABOUT_DEVICE: dict[Any, Callable[[torch.device], Any]] = {
    torch.Tensor.device.__get__: lambda device: device,
    torch.Tensor.is_meta.__get__: lambda device: False,  # type: ignore[attr-defined]  # noqa: ARG005
    torch.Tensor.get_device: lambda device: -1 if device.type == "cpu" else device.index or 0,
}
_ABOUT_DEVICE |= {
    getattr(torch.Tensor, f"is_{kind}").__get__: partial(lambda kind, device: device.type == kind, kind)
    for kind in ("cpu", "cuda", "xpu", "mps", "mtia", "xla")
}
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_READ_WHOLE = frozenset((torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__))
