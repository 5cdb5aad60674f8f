"""How a rank joins the others of a run, and leaves them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TypeVar, cast
from uuid import uuid4

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from rota.errors import PipelineError
from rota.runtime.json_messages import broadcast_json

Result = TypeVar("Result")

_MEETING_S, _LOOK_S = 600, 0.02


def join() -> bool:
    """Be one of the run's processes, by what torchrun left in the environment; whether this call did it."""
    if dist.is_initialized():
        return False
    if "RANK" not in os.environ:
        raise PipelineError(
            "no process group: start the script by `rota run plan.json script.py` or torchrun, or call "
            "torch.distributed.init_process_group first"
        )
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", store=_meet(rank, size), rank=rank, world_size=size)
    else:
        dist.init_process_group("gloo")
    return True


def leave(groups: Iterable[dist.ProcessGroup | None]) -> None:
    """End these groups, those aside that the caller has ended already."""
    for group in groups:
        if dist.is_initialized():
            with suppress(ValueError):
                dist.destroy_process_group(group)


def _meet(rank: int, size: int) -> Store:
    """What only the processes of this start write to and read from.

    torchrun's agent keeps one store for all restarts (torch 2.13), and with it the addresses of processes that have
    ended, which Gloo would call. So each process shows a word of its own until the first one has answered it: no answer
    of an earlier start knows that word.

        process r   "word r": w ─────────────────▶ sees its w in the answer ──▶ "heard r": w name
        the first              "answer r": w name ─▶ looks for other words until its answer is heard
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, wait_for_workers=False)
    name = _answer_all(store, size) if rank == 0 else _ask(store, rank)
    return PrefixStore(f"rota/{name}", store)


def _ask(store: Store, rank: int) -> str:
    word = uuid4().hex
    store.set(f"rota/word {rank}", word)
    for _ in _looks([0]):
        answer = _got(store, f"rota/answer {rank}")
        if answer.startswith(word):
            break
    store.set(f"rota/heard {rank}", answer)
    return answer.removeprefix(word)


def _answer_all(store: Store, size: int) -> str:
    name, missing = uuid4().hex, [*range(1, size)]
    for _ in _looks(missing):
        for rank in [*missing]:
            answer = _got(store, f"rota/word {rank}") + name
            store.set(f"rota/answer {rank}", answer)
            if _got(store, f"rota/heard {rank}") == answer:
                missing.remove(rank)
        if not missing:
            break
    return name


def _looks(missing: list[int]) -> Iterator[None]:
    """Again and again, until whoever is missing has had time enough."""
    deadline = time.monotonic() + _MEETING_S
    while time.monotonic() < deadline:
        yield
        time.sleep(_LOOK_S)
    ranks = ", ".join(map(str, missing))
    raise PipelineError(
        f"process {ranks} has not joined the others within {_MEETING_S} s; look there for the first error"
    )


def _got(store: Store, key: str) -> str:
    """What is there, or nothing: without waiting for it."""
    return store.get(key).decode() if store.check([key]) else ""


def on_first(doing: str, act: Callable[[], Result]) -> Result:
    """What `act` returns on the first process, told to all as JSON; where there are no others, here. Collective.

    Raises PipelineError, on all, where it fails.
    """
    result: Result | None = None
    words, failure = "", None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            made = act()
            json.dumps(made)  # what JSON does not write must fail here, and not on the way to the others
            result = made
        except Exception as error:  # the others must hear of it, or they would wait
            words, failure = f"{type(error).__name__}: {error}", error
    if dist.is_initialized():
        result, words = broadcast_json([result, words])
    if words:
        raise PipelineError(f"{doing} failed on the first process ({words})") from failure
    return cast(Result, result)
