"""What a rank's file has before its tensors: it comes back as it was, other readers know it, wrong ones are refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import safetensors.torch
import torch

from rota import PipelineError
from rota.core.errors import FormatError
from rota.core.reading import Field
from rota.runtime.checkpoints.random_states import OnDevice, random_state, read_random_state, set_random_state
from rota.runtime.checkpoints.rank_file import (
    LENGTH,
    chunks_of,
    head_bytes,
    head_of,
    padded,
    read_head,
    starts_of,
    write_file,
)
from rota.runtime.checkpoints.values import DTYPES, bytes_of
from rota.runtime.launcher_files import states_in
from support.checkpoint_runs import TWO, Training, memory
from support.pool import Pool

CPU = torch.device("cpu")


def draw() -> list[Any]:
    """From all three generators; of pairs of normal numbers, the second ones, too."""
    drawn = [random.gauss(0, 1), random.random(), torch.rand(3).tolist(), torch.randn(1).item()]
    return [*drawn, float(numpy.random.standard_normal()), float(numpy.random.random_sample())]


def test_random_states_come_back_to_the_bit() -> None:
    for _ in range(3):  # each time with another half of a pair of normal numbers
        state = msgspec.structs.replace(random_state(CPU), device=OnDevice("cuda", bytes(range(16))))
        drawn = draw()
        found = read_random_state(Field("random", json.loads(msgspec.json.encode(state))))
        assert found == state
        set_random_state(found, CPU)
        assert draw() == drawn


def test_a_generator_of_numpys_that_cannot_be_saved_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy.random, "get_state", lambda legacy: {"bit_generator": "PCG64"})
    with pytest.raises(PipelineError, match="NumPy's random generator is PCG64, but checkpoints can hold only"):
        random_state(CPU)


def test_a_file_is_safetensors_whatever_the_dtype(tmp_path: Path) -> None:
    """What the format does not know is in it as bytes, or as pairs."""
    tensors = {name: torch.arange(48, dtype=torch.uint8).view(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"bool": torch.tensor([True, False]), "none": torch.empty(3, 0), "one": torch.tensor(3)}
    tensors |= {"turned": torch.rand(4, 3).T, "conjugate": torch.rand(3, dtype=torch.complex64).conj()}
    data = chunks_of(tensors)
    told = write_file(tmp_path / "file", [*data.items()])
    whole = (tmp_path / "file").read_bytes()
    assert len(whole) == told.num_bytes
    chunks, _ = read_head(whole[: head_bytes(whole, len(whole))])
    assert chunks == tuple(data)
    assert {chunk.key: (chunk.dtype, chunk.size) for chunk in chunks} == {
        key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()
    }
    found = safetensors.torch.load(whole)
    for key, tensor in tensors.items():
        assert bytes(bytes_of(found[key])) == bytes(bytes_of(tensor)), key
    assert found["complex128"].shape == (*tensors["complex128"].shape, 2)


def test_a_wrong_head_is_refused() -> None:
    chunks = tuple(chunks_of({"a": torch.ones(2, 3), "b": torch.ones(2).half()}))
    head = head_of(chunks, {"more": [1]})
    for whole in (head, padded(head, 4096)):
        found, beside = read_head(whole)
        assert (found, beside["more"].value, len(whole) % 64) == (chunks, [1], 0)
    text = head[LENGTH.size :].decode()
    for was, becomes in (
        (", [2, 3], [0, 0], [2, 3]]", ", [2, 3], [1, 0], [2, 3]]"),
        (", [2, 3], [0, 0], [2, 3]]", ", [2, 3], [0, 0]]"),
        (r"\"float32\"", r"\"Tensor\""),
        (r"[[\"a\"", r"[[\"b\""),
        (r"[[\"a\"", r"[[3"),
        ('"tensors"', '"tensor"'),
        ('"__metadata__"', '"__metadata"'),
        (text, "[]"),
        (text, '{"__metadata__": {"tensors": "[]", "beside": 3}}'),
        (text, '{"__metadata__": {"tensors": "[]", "beside": "{"}}'),
    ):
        assert was in text
        changed = text.replace(was, becomes, 1).encode()
        with pytest.raises(FormatError):
            read_head(LENGTH.pack(len(changed)) + changed)
    for begin in (b"", b"1234567", LENGTH.pack(2**63), LENGTH.pack(993)):
        with pytest.raises(FormatError):
            head_bytes(begin, 1000)
    with pytest.raises(FormatError, match="UTF-8"):
        read_head(LENGTH.pack(1) + b"\xff")
    assert starts_of(chunks, 64) == [64, 88, 92]


def commit_and_read(rank: int, folder: Path) -> None:
    with memory() as kept:
        training = Training(TWO)
        with training.pipeline:
            checkpoints = training.checkpoints(folder)
            training.steps(range(1))
            checkpoints.commit(1)
            (state,) = states_in(kept)
            found = safetensors.torch.load_file(kept / state.file)
            name, weight = next(iter(training.pipeline.named_parameters()))
            assert torch.equal(found[f"model/{name}"], weight)


@pytest.mark.dist
def test_a_snapshot_is_the_same_file(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, commit_and_read, tmp_path)
