"""The random states of Python and NumPy, which are read again only after they have changed.

Most steps draw from neither, and reading both takes 60 µs, where a whole commit of a small model takes 200 µs. A
generator has all of its state in its objects in memory. So if no byte of these has changed, the state has not. Neither
library promises that, so it is tried before it is relied on.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, final

from rota.errors import PipelineError

NUM_WORDS = 624  # of a Mersenne Twister, which all libraries use
WORDS = struct.Struct(f"<{NUM_WORDS}I")
_WORD = "<u4"  # NumPy's name of one
_HEADER_BYTES = object.__basicsize__  # of each object: the number of its references, and its class


class PythonState(NamedTuple):
    """What `random.getstate()` returns, with the words as bytes."""

    version: int
    words: bytes
    position: int
    gauss: float | None

    def to_python(self) -> tuple[Any, ...]:
        """What `random.setstate` takes."""
        return self.version, (*WORDS.unpack(self.words), self.position), self.gauss


class NumpyState(NamedTuple):
    """What `numpy.random.get_state()` returns for its global generator, an MT19937, with the words as bytes."""

    words: bytes
    position: int
    has_gauss: int
    gauss: float

    def to_numpy(self) -> tuple[Any, ...]:
        """What `numpy.random.set_state` takes."""
        words = sys.modules["numpy"].frombuffer(self.words, _WORD)
        return "MT19937", words, self.position, self.has_gauss, self.gauss


class _Known(NamedTuple):
    """A state, and what was in the objects that have it; they are kept, so that no other object gets their address."""

    objects: Sequence[object]
    contents: list[tuple[int, bytes]]
    state: Any


@final
class Generators:
    """Python's and NumPy's generators of this process, and their states as this object knows them."""

    def __init__(self) -> None:
        self._known: dict[Callable[[], Any], _Known] = {}

    def python(self) -> PythonState:
        """The state of Python's generator."""
        if not _is_python_known_by_contents():
            return _read_python()
        generator = random.getstate.__self__  # type: ignore[attr-defined]
        return self._state(_read_python, _objects_of_python(generator))  # type: ignore[no-any-return]

    def numpy(self) -> NumpyState | None:
        """The state of NumPy's generator; None if NumPy is not loaded. Raises PipelineError if it is no MT19937."""
        if (numpy := sys.modules.get("numpy")) is None:
            return None
        if not _is_numpy_known_by_contents():
            return _read_numpy()
        return self._state(_read_numpy, _objects_of_numpy(numpy.random.get_state.__self__))  # type: ignore[no-any-return]

    def _state(self, read: Callable[[], Any], objects: Sequence[object]) -> Any:
        contents = _contents(objects)
        known = self._known.get(read)
        if known is None or known.contents != contents:
            self._known[read] = known = _Known(objects, contents, read())
        return known.state


def _read_python() -> PythonState:
    version, (*words, position), gauss = random.getstate()
    return PythonState(version, WORDS.pack(*words), position, gauss)


def _read_numpy() -> NumpyState:
    state = sys.modules["numpy"].random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        raise PipelineError(
            f"NumPy's random generator is {state['bit_generator']}, but checkpoints can hold only the state of MT19937"
        )
    twister = state["state"]
    words = twister["key"].astype(_WORD, copy=False).tobytes()
    return NumpyState(words, twister["pos"], state["has_gauss"], state["gauss"])


def _objects_of_python(generator: Any) -> Sequence[object]:
    return generator, generator.gauss_next


def _objects_of_numpy(generator: Any) -> Sequence[object]:
    return generator, generator._bit_generator


def _contents(objects: Sequence[object]) -> list[tuple[int, bytes]]:
    """Which objects they are, and the bytes of each in memory, behind its header."""
    return [
        (id(each), ctypes.string_at(id(each) + _HEADER_BYTES, type(each).__basicsize__ - _HEADER_BYTES))
        for each in objects
    ]


@cache
def _is_python_known_by_contents() -> bool:
    generator = random.Random(0)
    return _changes(lambda: _objects_of_python(generator), partial(generator.gauss, 0, 1), generator.random)


@cache
def _is_numpy_known_by_contents() -> bool:
    generator = sys.modules["numpy"].random.RandomState(0)
    return _changes(lambda: _objects_of_numpy(generator), generator.standard_normal, generator.random_sample)


def _changes(objects: Callable[[], Sequence[object]], *draws: Callable[[], object]) -> bool:
    """Whether every draw changes the objects of a generator: also the second of a pair of normal numbers."""
    for draw in (draws[0], *draws):
        before = _contents(objects())
        draw()
        if _contents(objects()) == before:
            return False
    return True
