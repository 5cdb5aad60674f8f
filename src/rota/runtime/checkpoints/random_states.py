"""The random states in a checkpoint: those of the first process, which all processes get."""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rota.core.errors import FormatError, PipelineError
from rota.core.reading import Field
from rota.runtime.checkpoints.values import from_json

_NUM_WORDS = 624  # of a Mersenne Twister, which all libraries use
_TWISTER = "MT19937"
_MOST_BYTES = 2**16  # of a device's random state; CUDA's has 16


def random_state(device: torch.device) -> dict[str, Any]:
    """The random state of torch, Python, NumPy if it is loaded, and `device` if it is not the CPU.

    Raises PipelineError if NumPy's global generator is no MT19937.
    """
    version, words, gauss = random.getstate()
    of_python = version, torch.frombuffer(array("I", words), dtype=torch.uint32), gauss
    of_numpy = of_device = None
    if (numpy := sys.modules.get("numpy")) is not None:
        found = numpy.random.get_state(legacy=False)
        if (kind := found["bit_generator"]) != _TWISTER:
            raise PipelineError(
                f"NumPy's random generator is {kind}, but checkpoints can hold only the state of {_TWISTER}"
            )
        of_numpy = torch.from_numpy(found["state"]["key"]), found["state"]["pos"], found["has_gauss"], found["gauss"]
    if device.type != "cpu":
        of_device = device.type, torch.get_device_module(device).get_rng_state(device)
    return {"torch": torch.get_rng_state(), "python": of_python, "numpy": of_numpy, "device": of_device}


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Set the state that `random_state` returned.

    Where it has none of a device of this type, as it was saved on CPUs, the device's generator is seeded by a hash of
    the CPU's state: so it depends on the checkpoint alone, and is the same on all ranks.
    """
    torch.set_rng_state(state["torch"])
    if device.type != "cpu":
        _set_device(state, device)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    numpy = sys.modules.get("numpy")
    if numpy is not None and state["numpy"] is not None:
        words, *rest = state["numpy"]
        numpy.random.set_state((_TWISTER, words.numpy(), *rest))


def require_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Raises FormatError if the state of the device would not be accepted. Changes nothing."""
    if state["device"] is None or state["device"][0] != device.type:
        return
    generator: Any = torch.get_device_module(device)
    before = generator.get_rng_state(device)
    try:
        generator.set_rng_state(state["device"][1], device)
        is_valid = torch.equal(generator.get_rng_state(device), state["device"][1])
    except (RuntimeError, ValueError, TypeError):
        is_valid = False
    finally:
        generator.set_rng_state(before, device)
    if not is_valid:
        raise FormatError(f"training.random.device is not a random state of {device.type}")


def _set_device(state: Mapping[str, Any], device: torch.device) -> None:
    generator: Any = torch.get_device_module(device)
    if state["device"] is not None and state["device"][0] == device.type:
        generator.set_rng_state(state["device"][1], device)
        return
    digest = hashlib.blake2b(state["torch"].numpy().tobytes(), digest_size=8).digest()
    before = torch.get_rng_state()
    generator.manual_seed(int.from_bytes(digest, "big") % 2**63)
    torch.set_rng_state(before)


def read_random_state(field: Field) -> dict[str, Any]:
    """The saved state, after trying it on generators of our own: setting it later must not fail half-way."""
    field.refuse_others(_CHECKS)
    state = {name: from_json(field[name]) for name in _CHECKS}
    for name, is_valid in _CHECKS.items():
        try:
            if is_valid(state[name]):
                continue
        except (RuntimeError, ValueError, TypeError, OverflowError, AttributeError, struct.error):
            pass
        raise field[name].wrong("a random state, as this version of Rota, PyTorch and Python saves it")
    return state


def _is_of_torch(state: Any) -> bool:
    generator = torch.Generator()
    generator.set_state(state)
    # PyTorch does not check that the words left and the next index match, and would read beyond the last word.
    left, _, following = struct.unpack_from("iiQ", state.numpy().data, 8)
    return left + following <= _NUM_WORDS + 1 and torch.equal(generator.get_state(), state)


def _is_of_python(state: Any) -> bool:
    version, words, gauss = state
    generator, state = random.Random(), (version, tuple(words.tolist()), gauss)
    generator.setstate(state)
    is_same = generator.getstate() == state  # Python converts the states of its older versions
    return is_same and (gauss is None or type(gauss) is float)


def _is_of_numpy(state: Any) -> bool:
    """NumPy accepts any position, and reads beyond its words."""
    if state is None:
        return True
    words, position, has_gauss, gauss = state
    is_twister = (words.dtype, words.shape, type(position)) == (torch.uint32, (_NUM_WORDS,), int)
    is_normal = (type(has_gauss), type(gauss)) == (int, float) and has_gauss in (0, 1)
    return is_twister and is_normal and 0 <= position <= _NUM_WORDS


def _is_of_device(state: Any) -> bool:
    """Whether it is one is known where there is such a device, see `require_random_state`."""
    if state is None:
        return True
    kind, data = state
    return type(kind) is str and data.dtype == torch.uint8 and data.dim() == 1 and len(data) <= _MOST_BYTES


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "torch": _is_of_torch,
    "python": _is_of_python,
    "numpy": _is_of_numpy,
    "device": _is_of_device,
}
