"""Tensors of the simulated device: a CPU tensor inside, and the block that its memory belongs to.

Each operation that reaches the device runs at once on the inner tensors, after `SimDevice.launch` has checked it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch

from support.sim_device import autocast
from support.sim_device.device import HAS_THREADS, Block, SimDevice, current_device

CPU = torch.device("cpu")
NS_PER_TICK = 0.7  # of the device's clock
#: Operations whose result, or its shape, the host needs.
READ_BY_HOST = frozenset(
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "nonzero_numpy", "masked_select", "unique_dim"),
        *("_unique", "_unique2", "unique_consecutive", "histc", "bincount", "allclose"),
    )
)
#: Views that their schemas do not show.
VIEWS = frozenset({"aten::_unsafe_view", "aten::lift_fresh", "aten::_reshape_alias"})


class MixedDevicesError(RuntimeError):
    """An operation got tensors of several devices."""


class SimTensor(torch.Tensor):
    """A tensor of a `SimDevice`."""

    inner: torch.Tensor
    block: Block

    @staticmethod
    def __new__(cls, inner: torch.Tensor, block: Block) -> SimTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device("sim:0"),
        )
        made.inner, made.block = inner, block
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})

    def record_stream(self, stream: torch.Stream) -> None:
        """See `Block.record_stream`."""
        self.block.record_stream(stream)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            copied = self.detach().clone().requires_grad_(self.requires_grad)
            is_parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(copied, self.requires_grad) if is_parameter else copied
        found: torch.Tensor = memo[id(self)]
        return found

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory itself: views share it, and it counts while any of them is alive."""
        return self.inner.untyped_storage()

    def tolist(self) -> Any:
        """The values as numbers, for which the host waits."""
        return self.cpu().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"SimTensor({list(self.shape)}, {self.dtype}, {self.block.device})"

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The same memory, of which autograd knows nothing. Setting it exchanges the memory."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        assert isinstance(other, SimTensor), f"data of a tensor on sim was set to one on {other.device}"
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.inner, self.block = other.inner, other.block


# --- operations -------------------------------------------------------------------------------------------------------


class _Schema(NamedTuple):
    name: str
    is_view: bool
    written: tuple[tuple[int, str], ...]  # arguments that are written to, by position and name
    is_random: bool


@cache
def _schema(func: Any) -> _Schema:
    schema = func._schema
    written = tuple(
        (i, argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    aliased = [r.alias_info is not None and not r.alias_info.is_write for r in schema.returns]
    is_view = (bool(aliased) and all(aliased) and not written) or schema.name in VIEWS
    return _Schema(schema.name, is_view, written, torch.Tag.nondeterministic_seeded in func.tags)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


def _map(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(_map(each, change) for each in value)
    return value


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.inner if isinstance(tensor, SimTensor) else tensor


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    schema = _schema(func)
    tensors = [*_tensors(args), *_tensors([*kwargs.values()])]
    sims = [tensor for tensor in tensors if isinstance(tensor, SimTensor)]
    device = _device_of(sims, schema.name)
    _refuse_others(tensors, sims, schema.name)
    written = [t for i, name in schema.written for t in _tensors(args[i] if i < len(args) else kwargs.get(name))]
    if not schema.is_view and schema.name != "aten::empty_like":  # neither launches anything
        blocks = [tensor.block for tensor in written if isinstance(tensor, SimTensor)]
        device.launch(schema.name, [tensor.block for tensor in sims], blocks)
    waits = not schema.is_view and _host_waits(schema.name, args, kwargs, tensors)
    if waits:
        device.host_waits(device.current_stream.clock, schema.name, device.current_stream.free_ns)
    to_cpu = _goes_to(CPU, schema.name, kwargs) or any(not isinstance(tensor, SimTensor) for tensor in written)
    changed = {name: _map(value, _inner) for name, value in kwargs.items()}
    if changed.get("device") is not None:
        changed["device"] = CPU
    with _Randomness(device, schema.is_random):
        result = func(*_map(args, _inner), **changed)
    if to_cpu:
        if not waits:
            device.copies_later(result)
        return result
    return _wrap(result, device, schema.name, tensors)


def _device_of(sims: list[SimTensor], name: str) -> SimDevice:
    devices = {id(sim.block.device): sim.block.device for sim in sims}
    if len(devices) > 1:
        raise MixedDevicesError(f"{name} got tensors of {' and '.join(map(str, devices.values()))}")
    return next(iter(devices.values())) if devices else current_device()


def _refuse_others(tensors: list[torch.Tensor], sims: list[SimTensor], name: str) -> None:
    if len(tensors) == len(sims) or name in ("aten::copy_", "aten::index", "aten::index_put_", "aten::set_"):
        return
    for tensor in tensors:
        if not isinstance(tensor, SimTensor) and tensor.dim():  # numbers may be on the CPU
            raise MixedDevicesError(
                f"{name} got a tensor of shape {list(tensor.shape)} on {tensor.device}, others on sim"
            )


def _host_waits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> bool:
    if name in READ_BY_HOST:
        return True
    if name in ("aten::index", "aten::index_put_"):  # a mask's size is read; indices on the CPU are copied
        return any(t.dtype in (torch.bool, torch.uint8) or not isinstance(t, SimTensor) for t in _tensors(args[1]))
    if name == "aten::repeat_interleave":
        return kwargs.get("output_size") is None
    is_nonblocking = kwargs.get("non_blocking", args[2] if name == "aten::copy_" and len(args) > 2 else False)
    if name == "aten::copy_":  # from or to the host: asynchronous only with its pinned memory
        return not all(isinstance(t, SimTensor) or (is_nonblocking and t.is_pinned()) for t in tensors)
    return _goes_to(CPU, name, kwargs) and not is_nonblocking  # PyTorch makes it pinned


def _goes_to(device: torch.device, name: str, kwargs: dict[str, Any]) -> bool:
    to = kwargs.get("device")
    return to is not None and torch.device(to).type == device.type and name == "aten::_to_copy"


def _wrap(result: Any, device: SimDevice, name: str, tensors: list[torch.Tensor]) -> Any:
    """Results as tensors of the device: arguments that were written to, views of them, or new blocks."""
    blocks = {_storage(t.inner): t.block for t in tensors if isinstance(t, SimTensor)}

    def wrapped(made: torch.Tensor) -> torch.Tensor:
        for given in tensors:
            if _inner(given) is made:
                return given
        storage = _storage(made)
        if storage not in blocks:
            blocks[storage] = _new_block(made, device, name, is_written=True)
        return SimTensor(made, blocks[storage])

    return _map(result, wrapped)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _new_block(made: torch.Tensor, device: SimDevice, name: str, is_written: bool) -> Block:
    what = f"{name}'s {list(made.shape)}"
    return Block(device, made.untyped_storage().nbytes(), what, name if is_written else None)


class _Randomness:
    """Operations that draw use the device's own random state."""

    def __init__(self, device: SimDevice, is_used: bool) -> None:
        self._device, self._is_used = device, is_used

    def __enter__(self) -> None:
        if self._is_used:
            self._before = torch.get_rng_state()
            torch.set_rng_state(self._device.rng_state)

    def __exit__(self, *_: object) -> None:
        if self._is_used:
            self._device.rng_state = torch.get_rng_state()
            torch.set_rng_state(self._before)


# --- the backend ------------------------------------------------------------------------------------------------------


class _Backend:
    """What PyTorch asks of `torch.sim`."""

    _initialized = True

    def device(self, index: object) -> AbstractContextManager[None]:
        """`torch.cuda.device`: there is one device."""
        return nullcontext()

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Called by `torch.manual_seed`, also where no device is active."""
        try:
            device = current_device()
        except RuntimeError:
            return
        device.rng_state = torch.Generator().manual_seed(seed).get_state()

    manual_seed = manual_seed_all

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return current_device().rng_state.clone()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        current_device().rng_state = state.clone()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def _sleep(self, ticks: int) -> None:
        """A kernel that lasts so many ticks."""
        current_device().launch("sleep", lasts_ns=round(ticks * NS_PER_TICK))


torch.utils.rename_privateuse1_backend("sim")
torch.utils.generate_methods_for_privateuse1_backend()
torch._register_device_module("sim", _Backend())
_library = torch.library.Library("aten", "IMPL")
_autocast = autocast.install()


def _factory(func: Any) -> Callable[..., SimTensor]:
    def make(*args: Any, **kwargs: Any) -> SimTensor:
        kwargs.pop("pin_memory", None)
        device = current_device()
        made = func(*args, **{**kwargs, "device": CPU})
        return SimTensor(made, _new_block(made, device, func._schema.name, is_written=False))

    return make


for _func in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default):
    _library.impl(_func.name().removeprefix("aten::"), _factory(_func), "PrivateUse1")


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copies that PyTorch starts below `__torch_dispatch__`, as in `torch.tensor(…, device="sim")`."""
    return _dispatch(torch.ops.aten.copy_.default, (target, source), {"non_blocking": non_blocking})


_library.impl("_copy_from", _copy_from, "PrivateUse1")


def _has_threads() -> bool:
    """Whether autograd's engine has a thread for the device: not if this process had a backward before."""
    try:
        torch.ones((), device="sim", requires_grad=True).mul(2).backward()
    except RuntimeError:  # its queues are those of the devices there were at the first backward
        return False
    return True


with SimDevice().active():
    HAS_THREADS[0] = _has_threads()
