"""What a state in memory has beside its tensors: it comes back as it was, and what is wrong in it is refused."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from rota.errors import FormatError
from rota.reading import Field
from rota.runtime.checkpoints.in_memory import StatesInMemory, read_head
from rota.runtime.checkpoints.optimizer_state import same
from rota.runtime.checkpoints.random_states import random_from_json, random_state, random_to_json, set_random_state
from rota.runtime.kept_memory import Slots
from support.checkpoint_runs import TWO, Training, memory
from support.pool import Pool

pytestmark = pytest.mark.dist


def kept_state(folder: Path, act: Callable[[StatesInMemory], None] = lambda _: None) -> bytes:
    """The state of step 1 in memory, after `act`."""
    with memory() as file:
        training = Training(TWO)
        with training.pipeline:
            checkpoints = training.checkpoints(folder)
            training.steps(range(1))
            assert checkpoints._in_memory is not None
            act(checkpoints._in_memory)
            checkpoints.commit(1)
            return bytes(Slots(file).data(1))


CPU = torch.device("cpu")


def draw() -> list[Any]:
    """From all three generators; of pairs of normal numbers, the second ones, too."""
    drawn = [random.gauss(0, 1), random.random(), torch.rand(3).tolist(), torch.randn(1).item()]
    return [*drawn, float(numpy.random.standard_normal()), float(numpy.random.random_sample())]


def go_on_drawing(rank: int, folder: Path) -> None:
    expected: list[Any] = []
    for _ in range(3):  # each time with another half of a pair of normal numbers
        data = kept_state(folder, lambda _: expected.append(random_state(CPU)))
        drawn = draw()
        found = read_head(memoryview(data)).random
        assert same(found, expected[-1])
        set_random_state(found, CPU)
        assert draw() == drawn


def test_random_states_come_back_to_the_bit(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, go_on_drawing, tmp_path)


def test_bytes_are_read_in_the_order_in_which_they_were_written() -> None:
    state = {**random_state(CPU), "device": ("cuda", torch.arange(16, dtype=torch.uint8))}
    beside: list[bytes] = []

    def written(data: bytes) -> int:
        beside.append(data)
        return len(data)

    text = json.dumps(random_to_json(state, written))
    assert len(beside) == 4
    found = random_from_json(Field("random", json.loads(text)), lambda _: bytearray(beside.pop(0)))
    assert same(found, state)


def set_at(place: tuple[Any, ...], value: Any) -> Callable[[Any], None]:
    def change(head: Any) -> None:
        *path, last = place
        for step in path:
            head = head[step]
        head[last] = value

    return change


def repeat_group(head: Any) -> None:
    head["records"].append(head["records"][0])


CHANGES: list[tuple[Callable[[Any], None], str]] = [
    (set_at(("random", "torch"), 10**9), r"memory.random.torch is 1000000000; expected .* or less"),
    (set_at(("random", "torch"), -1), "expected 0 or more"),
    (set_at(("random", "torch"), 0), "expected a random state of PyTorch"),
    (set_at(("random", "torch"), 5055), "is not a random state"),
    (set_at(("random", "torch"), "AA=="), "expected a whole number"),
    (set_at(("random", "python", 1), 2492), "expected 624 words of 4 bytes"),
    (set_at(("random", "python", 2), 625), "expected 624 or less"),
    (set_at(("random", "numpy", 1), True), "expected a whole number"),
    (set_at(("random", "numpy", 1), 2500), "expected 624 words of 4 bytes"),
    (set_at(("random", "device"), ["cuda", 10**6]), "or less"),
    (set_at(("random", "device"), ["cuda", 0]), "expected 1 to 65536 bytes"),
    (set_at(("records",), 3), "expected a list"),
    (set_at(("records", 0), [{}]), "expected a pair"),
    (set_at(("records", 0, 0), 3), "expected an object"),
    (set_at(("records", 0, 1), 3), "expected an object"),
    (set_at(("records", 0, 1, "x"), 3), "expected an object"),
    (set_at(("records", 0, 0, "more"), 3), "which is not one of optimizer"),
    (repeat_group, "expected a weight that occurs only once"),
    (set_at(("tensors", 0, 2), [10**6]), "but its tensors end at byte"),
]


def refuse_wrong_heads(rank: int, folder: Path) -> None:
    data = kept_state(folder)
    read_head(memoryview(data))
    (length,) = struct.unpack_from("<Q", data)
    text, rest = data[8 : 8 + length], data[8 + length :]
    for change, told in CHANGES:
        head = json.loads(text)
        change(head)
        changed = json.dumps(head).encode()
        with pytest.raises(FormatError, match=told):
            read_head(memoryview(struct.pack("<Q", len(changed)) + changed + rest + bytes(4096)))
    for cut in (0, 7, 8, 100, 8 + length, 9 + length, len(data) - 1):
        with pytest.raises(FormatError):
            read_head(memoryview(data)[:cut])


def test_a_wrong_head_is_refused(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, refuse_wrong_heads, tmp_path)
