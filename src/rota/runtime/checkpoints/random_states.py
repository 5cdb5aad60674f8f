"""The random states in a checkpoint: those of the first process, which all processes get."""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from typing import Annotated, Any, TypeAlias

import msgspec
import torch
from msgspec import Meta

from rota.core.errors import FormatError, PipelineError

_NUM_WORDS = 624  # of a Mersenne Twister, which all libraries use
_TWISTER = "MT19937"
_PYTHONS_VERSION = 3  # of its random states

#: A generator's words, the next of them, and the number that `gauss` returns next, if it has one.
Twister: TypeAlias = tuple[torch.Tensor, Annotated[int, Meta(ge=0, le=_NUM_WORDS)], float | None]


class RandomState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """That of torch on the CPU, Python, NumPy if it is loaded; of a device that is not the CPU, its type and state."""

    cpu: torch.Tensor
    python: Twister
    numpy: Twister | None
    device: tuple[str, torch.Tensor] | None


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
        key, next_gauss = torch.from_numpy(state["state"]["key"]), state["gauss"] if state["has_gauss"] else None
        of_numpy = key, int(state["state"]["pos"]), next_gauss
    if device.type != "cpu":
        on_device = device.type, torch.get_device_module(device).get_rng_state(device)
    of_python = torch.tensor(words, dtype=torch.uint32, device="cpu"), position, gauss
    return RandomState(torch.get_rng_state(), of_python, of_numpy, on_device)


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Set the state that `random_state` returned.

    Where it has none of a device of this type, as it was saved on CPUs, the device's generator is seeded by a hash of
    the CPU's state: so it depends on the checkpoint alone, and is the same on all ranks.
    """
    if device.type != "cpu":
        generator: Any = torch.get_device_module(device)
        if state.device is not None and state.device[0] == device.type:
            generator.set_rng_state(state.device[1], device)
        else:
            digest = hashlib.blake2b(state.cpu.numpy().tobytes(), digest_size=8).digest()
            generator.manual_seed(int.from_bytes(digest, "big") % 2**63)
    torch.set_rng_state(state.cpu)
    words, position, gauss = state.python
    random.setstate((_PYTHONS_VERSION, (*words.tolist(), position), gauss))
    if (numpy := sys.modules.get("numpy")) is not None and state.numpy is not None:
        words, position, gauss = state.numpy
        numpy.random.set_state((_TWISTER, words.numpy(), position, int(gauss is not None), gauss or 0.0))


def require_random_state(state: RandomState, device: torch.device) -> None:
    """Raises FormatError if a generator of this process would not take a state. Changes nothing."""
    for name, of_library in (("python", state.python), ("numpy", state.numpy)):
        if of_library is not None and (of_library[0].dtype, of_library[0].shape) != (torch.uint32, (_NUM_WORDS,)):
            raise FormatError(f"random.{name} has not {_NUM_WORDS} words; it is not a random state")
    if not _is_of_torch(state.cpu):
        raise FormatError("random.cpu is not a random state, as this version of PyTorch saves it")
    if state.device is None or state.device[0] != device.type:
        return
    generator: Any = torch.get_device_module(device)
    before = generator.get_rng_state(device)
    try:
        generator.set_rng_state(state.device[1], device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise FormatError(f"random.device is not a random state of {device.type}: {error}") from None
    finally:
        generator.set_rng_state(before, device)


def _is_of_torch(state: torch.Tensor) -> bool:
    generator = torch.Generator()
    try:
        generator.set_state(state)
        # PyTorch does not check that the words left and the next index match, and would read beyond the last word.
        left, _, following = struct.unpack_from("iiQ", state.numpy().tobytes(), 8)
    except (RuntimeError, TypeError, ValueError, struct.error):
        return False
    return left + following <= _NUM_WORDS + 1 and torch.equal(generator.get_state(), state)
