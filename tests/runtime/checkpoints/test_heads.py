"""What a rank's file has before its tensors: it comes back as it was, other readers know it, wrong ones are refused."""

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import safetensors.torch
import torch

from rota import FormatError, PipelineError
from rota.core.reading import Field
from rota.runtime.checkpoints.random_states import RandomState, random_state, require_random_state, set_random_state
from rota.runtime.checkpoints.tensors import chunks_of, head_of, padded, read_file, read_values, write_file
from rota.runtime.checkpoints.values import DTYPES, from_json, to_json
from rota.runtime.fingerprints import bytes_of

CPU = torch.device("cpu")


def draw() -> list[Any]:
    """From all three generators; of pairs of normal numbers, the second ones, too."""
    drawn = [random.gauss(0, 1), random.random(), torch.rand(3).tolist(), torch.randn(1).item()]
    return [*drawn, float(numpy.random.standard_normal()), float(numpy.random.random_sample())]


def test_random_states_come_back_to_the_bit() -> None:
    for _ in range(3):  # each time with another half of a pair of normal numbers
        state = msgspec.structs.replace(random_state(CPU), device=("cuda", torch.arange(16, dtype=torch.uint8)))
        drawn = draw()
        written = json.dumps(to_json(msgspec.structs.asdict(state), "state"))
        read = Field("random", from_json(Field("random", json.loads(written)))).read(RandomState)
        require_random_state(read, CPU)
        set_random_state(read, CPU)
        assert draw() == drawn


def test_a_generator_of_numpys_that_cannot_be_saved_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy.random, "get_state", lambda legacy: {"bit_generator": "PCG64"})
    with pytest.raises(PipelineError, match="NumPy's random generator is PCG64, but checkpoints can hold only"):
        random_state(CPU)


def test_a_file_is_safetensors_whatever_the_dtype(tmp_path: Path) -> None:
    tensors = {name: torch.arange(48, dtype=torch.uint8).view(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"BOOL": torch.tensor([True, False]), "none": torch.empty(3, 0), "one": torch.tensor(3)}
    tensors |= {"turned": torch.rand(4, 3).T, "conjugate": torch.rand(3, dtype=torch.complex64).conj()}
    tensors |= {"of every fifth": torch.rand(10)[::5][:1]}  # whose stride is 5, though it has one element
    data = chunks_of(tensors)
    file = write_file(path := tmp_path / "file", data, {"more": [1]})
    parts, training = read_file(path, file)
    assert tuple(part.chunk for part in parts) == tuple(data)
    assert training.value == {"more": [1]}
    stored = safetensors.torch.load_file(path)
    assert stored.keys() == tensors.keys()
    for part in parts:
        key = part.chunk.key
        for value in (read_values(part), stored[key]):
            assert (value.dtype, value.shape) == (tensors[key].dtype, tensors[key].shape)
            assert bytes(bytes_of(value)) == bytes(bytes_of(tensors[key])), key


def test_a_wrong_head_is_refused(tmp_path: Path) -> None:
    data = chunks_of({"a": torch.ones(2, 3), "b": torch.ones(2).half()})
    head, path = head_of(tuple(data), {"more": [1]}), tmp_path / "file"
    values = b"".join(bytes(bytes_of(tensor)) for tensor in data.values())
    for whole in (head, padded(head, 4096)):
        path.write_bytes(whole + values)
        parts, training = read_file(path, None)
        assert ([part.chunk for part in parts], training.value, len(whole) % 64) == ([*data], {"more": [1]}, 0)
    text = head[8:].decode()
    for was, becomes in (
        (", [2, 3], [0, 0], [2, 3]]", ", [2, 3], [1, 0], [2, 3]]"),
        (", [2, 3], [0, 0], [2, 3]]", ", [2, 3], [0, 0]]"),
        (r"\"F32\"", r"\"Tensor\""),
        (r"\"F32\"", r"\"F64\""),
        (r"[[\"a\"", r"[[\"b\""),
        (r"[[\"a\"", r"[[3"),
        ('"tensors"', '"tensor"'),
        ('"__metadata__"', '"__metadata"'),
        (text, "[]"),
        (text, '{"__metadata__": {"tensors": "[]", "training": 3}}'),
        (text, '{"__metadata__": {"tensors": "[]", "training": "{"}}'),
        (text, "\xff"),
    ):
        assert was in text
        changed = text.replace(was, becomes, 1).encode("latin-1")
        path.write_bytes(len(changed).to_bytes(8, "little") + changed + values)
        with pytest.raises(FormatError, match="file"):
            read_file(path, None)
    for begin in (b"", b"1234567", (2**63).to_bytes(8, "little"), (10).to_bytes(8, "little")):
        path.write_bytes(begin)
        with pytest.raises(FormatError, match="header"):
            read_file(path, None)
