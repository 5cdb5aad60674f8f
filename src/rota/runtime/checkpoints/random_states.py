"""The random states in a checkpoint, as JSON of which every field is checked.

torch, Python, NumPy   of the first process; all processes get it
device                 of the first process's accelerator: its type and its state; null if the stages were on CPUs
"""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rota.errors import FormatError, PipelineError
from rota.reading import Field
from rota.runtime.checkpoints.manifest import pair
from rota.runtime.checkpoints.values import from_base64, from_json, to_base64, to_json

_NUM_WORDS = 624  # of a Mersenne Twister, which all libraries use
_WORDS = struct.Struct(f"<{_NUM_WORDS}I")
_TWISTER, _NUMPY_WORD = "MT19937", "<u4"
_MOST_BYTES = 2**16  # of a device's random state; CUDA's has 16


def random_state(device: torch.device) -> dict[str, Any]:
    """The random state of torch, Python, NumPy if it is loaded, and `device`; reading it needs neither of these two.

    Raises PipelineError if NumPy's global generator is no MT19937.
    """
    of_numpy = None
    if (numpy := sys.modules.get("numpy")) is not None:
        found = numpy.random.get_state(legacy=False)
        if (kind := found["bit_generator"]) != _TWISTER:
            raise PipelineError(
                f"NumPy's random generator is {kind}, but checkpoints can hold only the state of {_TWISTER}"
            )
        words = found["state"]["key"].astype(_NUMPY_WORD, copy=False).tobytes()
        of_numpy = words, found["state"]["pos"], found["has_gauss"], found["gauss"]
    of_device = None
    if device.type != "cpu":
        of_device = device.type, torch.get_device_module(device).get_rng_state(device)
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": of_numpy, "device": of_device}


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Set the state that `random_state` returned.

    Where it has none of a device of this type, as it was saved on CPUs, the device's generator is seeded by a hash of
    the CPU's state: so it depends on the checkpoint alone, and is the same on all ranks.
    """
    torch.set_rng_state(state["torch"])
    if device.type != "cpu":
        _set_device(state, device)
    random.setstate(state["python"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and state["numpy"] is not None:
        words, *rest = state["numpy"]
        numpy.random.set_state((_TWISTER, numpy.frombuffer(words, _NUMPY_WORD), *rest))


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


def random_to_json(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state as JSON."""
    version, (*words, position), gauss = state["python"]
    of_python = [version, to_base64(_WORDS.pack(*words)), position, to_json(gauss, "Python's random state")]
    of_numpy, of_device = None, None
    if state["numpy"] is not None:
        of_words, at, has_gauss, gauss = state["numpy"]
        of_numpy = [_TWISTER, to_base64(of_words), at, has_gauss, to_json(gauss, "NumPy's random state")]
    if state["device"] is not None:
        kind, device_state = state["device"]
        of_device = [kind, to_base64(device_state.numpy().data)]
    of_torch = to_base64(state["torch"].numpy().data)
    return {"python": of_python, "torch": of_torch, "numpy": of_numpy, "device": of_device}


def random_from_json(field: Field) -> dict[str, Any]:
    """The saved state, after trying it on generators of our own: setting it later must not fail half-way."""
    field.refuse_others(("torch", "python", "numpy", "device"))
    return {
        "python": _python_state(field["python"]),
        "torch": _torch_state(field["torch"]),
        "numpy": None if field["numpy"].value is None else _numpy_state(field["numpy"]),
        "device": None if field["device"].value is None else _device_state(field["device"]),
    }


def _torch_state(field: Field) -> torch.Tensor:
    generator = torch.Generator()
    try:
        state = torch.frombuffer(from_base64(field), dtype=torch.uint8)
        _accepted(field, lambda: generator.set_state(state))
        # PyTorch does not check that the words left and the next index match, and would read beyond the last word.
        left, _, following = struct.unpack_from("iiQ", state.numpy().data, 8)
    except (ValueError, struct.error):
        raise field.wrong("a random state of PyTorch") from None
    if left + following > _NUM_WORDS + 1 or not torch.equal(generator.get_state(), state):
        raise field.wrong("a valid random state of PyTorch")
    return state


def _python_state(field: Field) -> tuple[Any, ...]:
    if len(parts := [*field]) != 4:
        raise field.wrong("a version, words, a position and None or a float")
    words = _WORDS.unpack(_words(parts[1]))
    state = parts[0].integer(0), (*words, parts[2].integer(0, _NUM_WORDS)), _float_or_none(parts[3])
    generator = random.Random()
    _accepted(field, lambda: generator.setstate(state))
    if generator.getstate() != state:  # Python converts the states of its older versions
        raise FormatError(f"{field.path} is not a random state of this version of Python")
    return state


def _numpy_state(field: Field) -> tuple[bytes, int, int, float]:
    if len(parts := [*field]) != 5 or parts[0].value != _TWISTER:
        raise field.wrong(f"a state of {_TWISTER}")
    words, position = _words(parts[1]), parts[2].integer(0, _NUM_WORDS)  # NumPy accepts any position
    if (gauss := _float_or_none(parts[4])) is None:
        raise parts[4].wrong("a float")
    return words, position, parts[3].integer(0, 1), gauss


def _device_state(field: Field) -> tuple[str, torch.Tensor]:
    """Whether it is one is known where there is such a device, see `require_random_state`."""
    kind, state = pair(field)
    if not 0 < len(data := from_base64(state)) <= _MOST_BYTES:
        raise state.wrong(f"1 to {_MOST_BYTES} bytes")
    return kind.name(), torch.frombuffer(data, dtype=torch.uint8)


def _words(field: Field) -> bytes:
    if len(data := from_base64(field)) != _WORDS.size:
        raise field.wrong(f"{_NUM_WORDS} words of 4 bytes")
    return bytes(data)


def _float_or_none(field: Field) -> float | None:
    if (value := from_json(field)) is not None and type(value) is not float:
        raise field.wrong("a float")
    return value


def _accepted(field: Field, act: Callable[[], object]) -> None:
    try:
        act()
    except (RuntimeError, ValueError, TypeError, OverflowError):
        raise FormatError(f"{field.path} is not a random state") from None
