"""Processes find each other; small values reach all of them as they are, or are refused before anything is sent."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from rota import PipelineError
from rota.runtime import process_group as joining
from rota.runtime.json_messages import _device, all_gather_json, broadcast_json
from rota.runtime.process_group import on_first
from support.pool import Pool

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


# --- processes find each other at a store that earlier starts have written to -----------------------------------------


def meet(store: dist.Store, num_processes: int) -> list[str]:
    """All processes but the first one come first, so that they find what the start before has left."""
    with ThreadPoolExecutor(num_processes) as threads:
        others = [threads.submit(joining._ask, store, rank, 600) for rank in range(1, num_processes)]
        first = threads.submit(joining._answer_all, store, num_processes, 600)
        return [found.result() for found in (first, *others)]


def test_each_start_has_a_name_of_its_own() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=100))
    names = [meet(store, num_processes) for num_processes in (3, 3, 2, 4, 1)]
    assert all(len(set(of_start)) == 1 for of_start in names)
    assert len({of_start[0] for of_start in names}) == len(names)


def test_who_does_not_come_is_told() -> None:
    store = dist.HashStore()
    meet(store, 3)  # what these have left is no answer
    with pytest.raises(PipelineError, match=r"process 1, 2 has not joined the others within 0.1 s"):
        joining._answer_all(store, 3, 0.1)
    with pytest.raises(PipelineError, match=r"process 0 has not joined"):
        joining._ask(store, 2, 0.1)
