"""The random states in a checkpoint: those of the first process, which all processes get."""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from array import array
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from rota.core.errors import FormatError, PipelineError
from rota.core.reading import Field

_NUM_WORDS = 624  # of a Mersenne Twister, which all libraries use
_TWISTER = "MT19937"
_PYTHONS_VERSION = 3  # of its random states


class Twister(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A generator's words, the next of them, and the number that `gauss` returns next, if it has one."""

    words: Annotated[bytes, Meta(min_length=4 * _NUM_WORDS, max_length=4 * _NUM_WORDS)]
    position: Annotated[int, Meta(ge=0, le=_NUM_WORDS)]
    gauss: float | None


class OnDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of a device's generator; `kind` is the device's type."""

    kind: str
    state: Annotated[bytes, Meta(max_length=2**16)]  # CUDA's has 16


class RandomState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """That of torch on the CPU, Python, NumPy if it is loaded, and a device that is not the CPU."""

    torch: bytes
    python: Twister
    numpy: Twister | None
    device: OnDevice | None


def random_state(device: torch.device) -> RandomState:
    """The state of this process. Raises PipelineError if NumPy's global generator is no MT19937."""
    _, (*words, position), gauss = random.getstate()
    of_numpy = on_device = None
    if (numpy := sys.modules.get("numpy")) is not None:
        state = numpy.random.get_state(legacy=False)
        if (kind := state["bit_generator"]) != _TWISTER:
            raise PipelineError(
                f"NumPy's random generator is {kind}, but checkpoints can hold only the state of {_TWISTER}"
            )
        key, next_gauss = state["state"]["key"], state["gauss"] if state["has_gauss"] else None
        of_numpy = Twister(key.tobytes(), int(state["state"]["pos"]), next_gauss)
    if device.type != "cpu":
        on_device = OnDevice(device.type, _to_bytes(torch.get_device_module(device).get_rng_state(device)))
    of_python = Twister(array("I", words).tobytes(), position, gauss)
    return RandomState(_to_bytes(torch.get_rng_state()), of_python, of_numpy, on_device)


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Set the state that `random_state` returned.

    Where it has none of a device of this type, as it was saved on CPUs, the device's generator is seeded by a hash of
    the CPU's state: so it depends on the checkpoint alone, and is the same on all ranks.
    """
    torch.set_rng_state(_from_bytes(state.torch))
    if device.type != "cpu":
        generator: Any = torch.get_device_module(device)
        if state.device is not None and state.device.kind == device.type:
            generator.set_rng_state(_from_bytes(state.device.state), device)
        else:
            before = torch.get_rng_state()
            digest = hashlib.blake2b(state.torch, digest_size=8).digest()
            generator.manual_seed(int.from_bytes(digest, "big") % 2**63)
            torch.set_rng_state(before)
    words, position, gauss = array("I", state.python.words), state.python.position, state.python.gauss
    random.setstate((_PYTHONS_VERSION, (*words, position), gauss))
    numpy = sys.modules.get("numpy")
    if numpy is not None and state.numpy is not None:
        words, position, gauss = (
            numpy.frombuffer(state.numpy.words, numpy.uint32),
            state.numpy.position,
            state.numpy.gauss,
        )
        numpy.random.set_state((_TWISTER, words, position, int(gauss is not None), gauss or 0.0))


def require_random_state(state: RandomState, device: torch.device) -> None:
    """Raises FormatError if the state of the device would not be accepted. Changes nothing."""
    if state.device is None or state.device.kind != device.type:
        return
    generator: Any = torch.get_device_module(device)
    before = generator.get_rng_state(device)
    try:
        generator.set_rng_state(_from_bytes(state.device.state), device)
    except (RuntimeError, ValueError) as error:
        raise FormatError(f"training.random.device is not a random state of {device.type}: {error}") from None
    finally:
        generator.set_rng_state(before, device)


def read_random_state(field: Field) -> RandomState:
    """The saved state, after trying it on a generator of our own: setting it later must not fail half-way."""
    state = field.read(RandomState)
    if not _is_of_torch(state.torch):
        raise field["torch"].wrong("a random state, as this version of PyTorch saves it")
    return state


def _is_of_torch(state: bytes) -> bool:
    generator = torch.Generator()
    try:
        generator.set_state(_from_bytes(state))
        # PyTorch does not check that the words left and the next index match, and would read beyond the last word.
        left, _, following = struct.unpack_from("iiQ", state, 8)
    except (RuntimeError, ValueError, struct.error):
        return False
    return left + following <= _NUM_WORDS + 1 and _to_bytes(generator.get_state()) == state


def _to_bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _from_bytes(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
