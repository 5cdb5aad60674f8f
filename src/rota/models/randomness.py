"""The states of random generators that a forward can draw from: whether tracing it has drawn, and at which line."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, final

import torch
from torch import nn

_STDLIB = os.path.dirname(os.__file__)


class _Generator(NamedTuple):
    get: Callable[[], Any]
    set: Callable[[Any], Any]


@final
class RandomStates:
    """As they are now: PyTorch's, Python's and NumPy's own, and those of generators that `model` has as attributes.

    An accelerator's is among them if it is in use already. With `seeded`, those that `torch.manual_seed` sets are left
    out.
    """

    def __init__(self, model: nn.Module, seeded: bool = False) -> None:
        generators = [*_generators(model)] if seeded else [*_seeded_generators(), *_generators(model)]
        self._before = [(generator, generator.get()) for generator in generators]

    def changed(self) -> bool:
        """Whether any generator has been drawn from, or seeded."""
        return any(not _equal(state, generator.get()) for generator, state in self._before)

    def restore(self) -> None:
        """Set what has changed."""
        for generator, state in self._before:
            if not _equal(state, generator.get()):
                generator.set(state)

    def first_change(self, run: Callable[[], Any], is_users: Callable[[str], bool]) -> tuple[FrameType, int] | None:
        """The first line of this thread, in files for which `is_users`, that changes a state while `run` runs."""
        changes: list[tuple[FrameType, int]] = []
        last: tuple[FrameType, int] | None = None

        def look(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            del event, argument
            file = frame.f_code.co_filename
            if changes or not is_users(file) or os.path.dirname(file) == _STDLIB:  # which draws for the user's line
                return None
            if last is not None and self.changed():
                changes.append(last)
            last = frame, frame.f_lineno
            return look

        tracing_before, collecting_before = sys.gettrace(), gc.isenabled()
        gc.disable()  # its callbacks and finalizers run between any two instructions, and would be taken for the user's
        sys.settrace(look)
        try:
            run()
        finally:
            sys.settrace(tracing_before)
            if collecting_before:
                gc.enable()
        return changes[0] if changes else None


@contextmanager
def random_state_kept(model: nn.Module, seeded: bool = False) -> Iterator[None]:
    """All `RandomStates` afterwards as they were before."""
    states = RandomStates(model, seeded)
    try:
        yield
    finally:
        states.restore()


def _seeded_generators() -> Iterator[_Generator]:
    yield _Generator(torch.get_rng_state, torch.set_rng_state)
    device = torch.accelerator.current_accelerator()
    if device is None:
        return
    of_device: Any = torch.get_device_module(device)
    if hasattr(of_device, "is_initialized") and of_device.is_initialized():  # else nobody has drawn from it
        for index in range(of_device.device_count()):
            yield _Generator(partial(of_device.get_rng_state, index), partial(of_device.set_rng_state, device=index))


def _generators(model: nn.Module) -> Iterator[_Generator]:
    yield _Generator(random.getstate, random.setstate)
    numpy = sys.modules.get("numpy")  # if it is not loaded, nobody draws from it
    if numpy is not None:
        yield _Generator(numpy.random.get_state, numpy.random.set_state)
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Generator):
                yield _Generator(value.get_state, value.set_state)
            elif isinstance(value, random.Random):
                yield _Generator(value.getstate, value.setstate)
            elif numpy is not None and isinstance(value, numpy.random.RandomState):
                yield _Generator(value.get_state, value.set_state)
            elif numpy is not None and isinstance(value, numpy.random.Generator):
                bits = value.bit_generator
                yield _Generator(partial(getattr, bits, "state"), partial(setattr, bits, "state"))


def _equal(state: Any, other: Any) -> bool:
    if isinstance(state, torch.Tensor):
        return torch.equal(state, other)
    if isinstance(state, dict):
        return state.keys() == other.keys() and all(_equal(value, other[key]) for key, value in state.items())
    if isinstance(state, (tuple, list)):
        return len(state) == len(other) and all(map(_equal, state, other))
    same = state == other
    return bool(same.all()) if hasattr(same, "all") else bool(same)  # all elements of an array of NumPy's
