"""Small values reach all ranks as they are, and what JSON does not write is refused before anything is sent."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch.distributed as dist

from rota import PipelineError
from rota.runtime.json_messages import _device, all_gather_json, broadcast_json
from rota.runtime.process_group import on_first
from support.pool import Pool

pytestmark = pytest.mark.dist

VALUES: list[Any] = [
    None,
    {
        "name": "rank ü",
        "numbers": [1, 2.5, -math.inf, 2**70],
        "none": None,
        "nested": {"yes": True, "text": "x" * 5000},
    },
    [],
]


def tell(rank: int) -> tuple[Any, Any, Any]:
    gathered = all_gather_json(VALUES[rank])
    odd = dist.new_group([1, 2], backend="gloo")
    among = all_gather_json(rank, odd) if rank else None
    dist.barrier()
    return gathered, broadcast_json(VALUES[rank], source=1), among


def test_values_arrive_as_they_are(pool: Pool) -> None:
    for rank, (gathered, told, among) in enumerate(pool.run(3, tell)):
        assert gathered == VALUES
        assert told == VALUES[1]
        assert among == ([1, 2] if rank else None)


def tell_long(rank: int) -> bool:
    """Texts around the length of the first message, of other lengths on the other ranks."""
    for length in range(1010, 1020):
        values = ["x" * length, "y" * (2 * length if length % 2 else 3)]
        if (
            all_gather_json(values[rank]) != values
            or broadcast_json(values[rank], source=length % 2) != values[length % 2]
        ):
            return False
    return True


def test_no_byte_of_a_long_value_is_lost(pool: Pool) -> None:
    assert pool.run(2, tell_long) == [True, True]


def refused(rank: int) -> list[str]:
    told = []
    for value in ({1: "a"}, {"a": {2: "b"}}, {1, 2}, object()):
        for collective in (all_gather_json, broadcast_json):
            if collective is all_gather_json or rank == 0:
                with pytest.raises(TypeError) as error:
                    collective(value)
                told.append(str(error.value))
    dist.barrier()  # nobody waits for what was refused
    return told


def test_what_json_does_not_write_is_refused(pool: Pool) -> None:
    for told in pool.run(2, refused):
        assert "the key 1 is a int; JSON keys are str" in told[0]
        assert all("JSON" in words for words in told)


def on_first_with(rank: int) -> list[str]:
    told = [str(on_first("listing", lambda: [rank, "a"]))]
    for act in (lambda: {1, 2}, lambda: [][0]):
        with pytest.raises(PipelineError) as error:
            on_first("measuring", act)
        told.append(str(error.value))
    return told


def test_what_the_first_process_finds_is_told_to_all(pool: Pool) -> None:
    for listed, unwritable, failed in pool.run(2, on_first_with):
        assert listed == "[0, 'a']"
        assert unwritable.startswith("measuring failed on the first process (TypeError: Object of type set is not JSON")
        assert failed == "measuring failed on the first process (IndexError: list index out of range)"


@pytest.mark.parametrize(
    ("backends", "device"),
    [
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cuda:nccl", "cuda"),
        ("xpu:xccl", "xpu"),
    ],
)
def test_messages_go_on_a_device_that_the_group_takes(
    monkeypatch: pytest.MonkeyPatch, backends: str, device: str
) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda _: backends.rpartition(":")[2])
    monkeypatch.setattr(dist, "get_backend_config", lambda _: backends)
    assert _device(None) == device
