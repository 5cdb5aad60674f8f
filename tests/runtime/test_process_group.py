"""Processes find each other at a store that earlier starts have written to; communicators are aborted all at once."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from rota import PipelineError
from rota.runtime import process_group as joining


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


class Group:
    """A process group, of which only the abort counts."""

    def __init__(self, abort: Callable[[], object]) -> None:
        self.abort = abort


def test_groups_are_aborted_all_at_once_and_nobody_waits_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three aborts that end together, one that fails, and one that does not end."""
    monkeypatch.setattr(joining, "_abandoned", [])
    together, never, ended = threading.Barrier(3), threading.Event(), []
    groups = [Group(lambda: ended.append(together.wait())) for _ in range(3)]
    joining.abandon(groups, ValueError())  # type: ignore[arg-type]
    assert len(ended) == 3
    monkeypatch.setattr(joining, "_ABORT_S", 0.01)
    joining.abandon([Group(raise_error), Group(never.wait)], ValueError())  # type: ignore[list-item]
    never.set()


def raise_error() -> None:
    raise dist.DistBackendError("it was aborted before")
