"""How a rank joins the others of a run, and leaves them."""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import parse_qs, urlparse
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout

from rota.core.errors import LostRankError, PipelineError
from rota.runtime import control
from rota.runtime.device.local import group_backend
from rota.runtime.environment import STORE, end_with_parent
from rota.runtime.faults.watchdog import LONGEST_S, PATIENT, limit_s
from rota.runtime.json_messages import all_gather_json, broadcast_json
from rota.torch_internals import replace_rendezvous, set_default_timeout

Result = TypeVar("Result")

_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.001, 0.02
_LONGER = 1.1  # each pause than the one before: processes that start together meet within milliseconds
_ABORT_S = 3.0
_num_meetings = 0


def join(timeout_s: float | None = None) -> bool:
    """Join the other processes of the run, which `rota run` or torchrun described in the environment.

    `timeout_s`: as for `Pipeline`; the others have ten times that long to join. Returns whether this call has made the
    process group. Raises PipelineError if this process was not started as one of several, or another one did not join.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()  # torchrun ends its processes, except when it is killed itself
    if dist.is_initialized():
        return False
    if "RANK" not in os.environ:
        raise PipelineError(
            "no process group: start the script with `rota run plan.json script.py` or torchrun, or call "
            "torch.distributed.init_process_group first"
        )
    limit = _patience_s(limit_s(timeout_s))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    control.report("joins")
    store: Store | None = None
    if STORE in os.environ:
        store = _meet_at_launcher(rank, size, limit)
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = _meet_at_agent(rank, size, limit)
    timeout = timedelta(seconds=limit)
    dist.init_process_group(group_backend(), timeout=timeout, world_size=size, rank=rank, store=store)
    # All have joined; the script's own collectives may last as long as PyTorch allows, or longer.
    set_default_timeout(group_timeout(limit_s(timeout_s)))
    return True


def group_timeout(limit: float) -> timedelta:
    """A timeout for PyTorch's process groups, longer than a rank may make no progress if the limit is `limit` seconds.

    It is at least PyTorch's default of half an hour.
    """
    return max(timedelta(seconds=_patience_s(limit)), default_pg_timeout)


def _patience_s(limit: float) -> float:
    return min(PATIENT * limit, LONGEST_S)


def leave(groups: Iterable[dist.ProcessGroup | None]) -> None:
    """End these groups, except those that the caller has ended already."""
    for group in groups:
        if dist.is_initialized():
            with suppress(ValueError):
                dist.destroy_process_group(group)


_abandoned: list[BaseException] = []  # the errors with which kernels were left to wait


def abandon(groups: Sequence[dist.ProcessGroup], error: BaseException) -> None:
    """Abort groups on a device after an error, as their kernels may wait for ever for ranks that are gone.

    One after another they may deadlock, and an abort may not end (NVIDIA/nccl#1013, #863): so each has a thread, and
    no one waits for these for longer than `_ABORT_S`. From now on this process ends without Python's clean-up, which
    would wait for the kernels of all groups, those of the script as well.
    """
    _abandoned.append(error)
    threads = [threading.Thread(target=_abort, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + _ABORT_S
    for thread in threads:
        thread.join(max(deadline_s - time.monotonic(), 0))


def _abort(group: dist.ProcessGroup) -> None:
    with suppress(RuntimeError):
        group.abort()


def leave_world(is_own: bool) -> None:
    """End the default group if `is_own`; but after a rank was lost beside kernels that wait for it, this process."""
    if any(isinstance(error, LostRankError) for error in _abandoned):
        _end()
    if is_own and not _abandoned:
        leave([dist.group.WORLD])


def _end() -> None:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(1)


@atexit.register
def _end_abandoned() -> None:
    """After an error that the script let through, and Python has shown."""
    if _abandoned and getattr(sys, "last_value", None) is not None:
        _end()


# --- in the launcher's folder -----------------------------------------------------------------------------------------


def meet_by_environment() -> None:
    """Make `torch.distributed.init_process_group()` meet where the launcher says, too, instead of at a port."""
    if STORE in os.environ:
        replace_rendezvous("env", _handle_environment)


def _handle_environment(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[Store, int, int]]:
    query = {name: int(values[0]) for name, values in parse_qs(urlparse(url).query).items()}
    rank = query.get("rank", int(os.environ["RANK"]))
    size = query.get("world_size", int(os.environ["WORLD_SIZE"]))
    control.report("joins")
    yield _meet_at_launcher(rank, size, timeout.total_seconds()), rank, size


def _meet_at_launcher(rank: int, size: int, limit: float) -> Store:
    """A store that only the processes of this start use, once all have joined."""
    global _num_meetings
    _num_meetings += 1
    # A script may leave and join again; the earlier addresses are those of closed connections.
    store = PrefixStore(f"rota/{_num_meetings}", FileStore(os.environ[STORE], -1))
    store.set(f"here {rank}", "")
    missing = [*range(size)]
    for _ in _looks(missing, limit):
        while missing and store.check([f"here {missing[0]}"]):
            del missing[0]
        if not missing:
            break
    return store


# --- at torchrun's store ----------------------------------------------------------------------------------------------


def _meet_at_agent(rank: int, size: int, limit: float) -> Store:
    """A store that only the processes of this start use.

    torchrun's agent keeps one store for all restarts (torch 2.13), and with it the addresses of processes that have
    ended, which Gloo would call. So each process publishes a random word until the first process answers with that
    word, which no answer of an earlier start contains.

        process r   "word r": w ─────────────────▶ sees its w in the answer ──▶ "heard r": w name
        the first              "answer r": w name ─▶ looks for other words until its answer is heard
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, wait_for_workers=False)
    name = _answer_all(store, size, limit) if rank == 0 else _ask(store, rank, limit)
    return PrefixStore(f"rota/{name}", store)


def _ask(store: Store, rank: int, limit: float) -> str:
    word = uuid4().hex
    store.set(f"rota/word {rank}", word)
    for _ in _looks([0], limit):
        answer = _got(store, f"rota/answer {rank}")
        if answer.startswith(word):
            break
    store.set(f"rota/heard {rank}", answer)
    return answer.removeprefix(word)


def _answer_all(store: Store, size: int, limit: float) -> str:
    name, missing = uuid4().hex, [*range(1, size)]
    for _ in _looks(missing, limit):
        for rank in [*missing]:
            answer = _got(store, f"rota/word {rank}") + name
            store.set(f"rota/answer {rank}", answer)
            if _got(store, f"rota/heard {rank}") == answer:
                missing.remove(rank)
        if not missing:
            break
    return name


def _looks(missing: list[int], limit: float) -> Iterator[None]:
    """Yields repeatedly for `limit` seconds; then raises PipelineError that names the processes in `missing`."""
    begun, pause = time.monotonic(), _FIRST_LOOK_S
    while time.monotonic() < begun + limit:
        yield
        time.sleep(pause)
        pause = min(pause * _LONGER, _LONGEST_LOOK_S)
    ranks = ", ".join(map(str, missing))
    raise PipelineError(
        f"process {ranks} has not joined the others within {limit:g} s; look there for the first error, or give "
        f"`rota run`, rota.mesh or rota.Pipeline a larger timeout (they wait {PATIENT} times as long)"
    )


def _got(store: Store, key: str) -> str:
    """The value of `key`, or "" if it has none yet."""
    return store.get(key).decode() if store.check([key]) else ""


def on_first(doing: str, act: Callable[[], Result]) -> Result:
    """What `act` returns on the first process, sent to all as JSON; without a process group, it runs here. Collective.

    Raises PipelineError, on all processes, if it fails.
    """
    result: Any = None
    words, failure = "", None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            result = act()
            json.dumps(result)  # a value that JSON cannot hold must fail here, not in the broadcast
        except Exception as error:  # the others must get it, or they would wait
            result, words, failure = None, f"{type(error).__name__}: {error}", error
    if dist.is_initialized():
        result, words = broadcast_json([result, words])
    if words:
        raise PipelineError(f"{doing} failed on the first process ({words})") from failure
    return cast(Result, result)


# --- clocks -----------------------------------------------------------------------------------------------------------


def clock_offset_ns(group: dist.ProcessGroup, rounds: int = 20) -> int:
    """What to add to this rank's monotonic clock to get rank 0's, in ns.

    Ranks of one machine share the clock. Others ask rank 0 in turn (Cristian, "Probabilistic clock synchronization",
    1989): the fastest of several rounds counts, and rank 0 is taken to have read its clock in the middle of it.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    machines = all_gather_json(_machine(), group)
    offset = 0
    for other in range(1, size):
        if machines[other] != machines[0] and rank in (0, other):
            offset = answer_offset(other, group, rounds) if rank == 0 else ask_offset_ns(0, group, rounds)
    return offset


def answer_offset(peer: int, group: dist.ProcessGroup, rounds: int) -> int:
    """Answer a peer that runs `ask_offset_ns` with this rank's clock. Returns 0, the offset of one's own clock."""
    for _ in range(rounds):
        question = torch.empty(1, dtype=torch.int64, device="cpu")
        dist.recv(question, group_src=peer, group=group)
        dist.send(torch.tensor([time.monotonic_ns()], device="cpu"), group_dst=peer, group=group)
    return 0


def ask_offset_ns(peer: int, group: dist.ProcessGroup, rounds: int) -> int:
    """The peer's clock minus ours, in ns; the peer runs `answer_offset` meanwhile."""
    best_round_ns, offset = None, 0
    for _ in range(rounds):
        asked = time.monotonic_ns()
        dist.send(torch.tensor([asked], device="cpu"), group_dst=peer, group=group)
        answer = torch.empty(1, dtype=torch.int64, device="cpu")
        dist.recv(answer, group_src=peer, group=group)
        round_ns = time.monotonic_ns() - asked
        if best_round_ns is None or round_ns < best_round_ns:
            best_round_ns, offset = round_ns, int(answer) - (asked + round_ns // 2)
    return offset


def _machine() -> str:
    """Identifies the running kernel: processes that share it share its monotonic clock."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.exists() else socket.gethostname()
