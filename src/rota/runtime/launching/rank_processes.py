"""Starts the processes of a run, watches them, reports which one failed first, and ends them all.

supervisor ──▶ rank 0, rank 1, …   each leads a session of its own, so that processes it forks can be ended with it
    a process ends: its pidfd becomes readable; it is reaped only after its process group was killed, so that no
    other group can have the same number by then
    a process reports something: see `control`
"""

from __future__ import annotations

import os
import select
import selectors
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TypeAlias, final

from rota.core.errors import PipelineError
from rota.runtime import control
from rota.runtime.control import Message
from rota.runtime.launcher_files import State
from rota.runtime.launching.requests import EndedBySignal, Requests
from rota.runtime.launching.run_folder import Folder

_FIRST_FAILURE_S = 5.0  # that the rank with the first error has to print it and end, after others have lost it
_TERM_S = 5.0  # for handlers of SIGTERM that the script has set
_GONE_S = 60.0  # after SIGKILL: the kernel frees a rank's memory, and its device's driver what it holds there
_NO_PIPELINE = "no rank had made a rota.Pipeline"

#: Starts a process that leads a session of its own, with these variables, and with this open file: its process id.
Starter: TypeAlias = Callable[[Mapping[str, str], int], int]


class RankFailed(Exception):
    """How the first rank failed, or why all ranks hang."""

    def __init__(self, reason: str, is_hang: bool = False) -> None:
        super().__init__(reason)
        self._is_hang = is_hang

    def to_text(self, after: str) -> str:
        """The error of the launcher in one line; `after` says after how many restarts."""
        if self._is_hang:
            return f"{self}{after}, and all ranks were ended; see above for what each of them did"
        return f"{self}{after}, and the others were ended; see above for its output"


@final
class Ranks:
    """One start of all ranks, as a context manager: on exit it kills all processes that are left."""

    def __init__(self, folder: Folder, requests: Requests) -> None:
        self._folder, self._requests = folder, requests
        self._ranks: list[_Rank] = []
        self._running = 0
        self._suspects: list[_Rank] = []  # with a failure of their own, in the order of failing
        self._lost: list[_Rank] = []  # ended because another rank failed
        self._hang: str | None = None
        self._deadline_s: float | None = None
        #: The states with a whole checkpoint since this start, and whether any rank made a pipeline.
        self.saved: set[State] = set()
        self.has_pipeline = False

    def __enter__(self) -> Ranks:
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._requests, selectors.EVENT_READ)
        return self

    def start(self, starter: Starter, environments: Sequence[Mapping[str, str]]) -> None:
        """Start one process per environment.

        Raises PipelineError if the machine refuses to start one more; EndedBySignal, KeyboardInterrupt at a signal.
        """
        for number, environment in enumerate(environments):
            self._requests.end_if_asked("before they were started")
            try:
                rank = _started(number, starter, environment)
            except OSError as error:
                raise PipelineError(
                    f"process {number} of {len(environments)} cannot be started: {error.strerror}; start fewer, or "
                    f"raise the limit (ulimit -n, -u)"
                ) from None
            self._ranks.append(rank)
            self._running += 1
            for source in (rank.end, rank.line):
                self._selector.register(source, selectors.EVENT_READ, rank)
        self._folder.guard([rank.pid for rank in self._ranks])

    def wait(self) -> None:
        """Wait until all ranks have ended without failure.

        Raises RankFailed if one of them failed; EndedBySignal, KeyboardInterrupt at a signal to this process that ends
        all. Ranks may still run then.
        """
        while self._running:
            self._wait_for_event()
            for number in self._requests.taken():
                self._handle_signal(number)
            try:
                self._check_for_failure()
            except RankFailed:
                for rank in self._ranks:
                    self._receive(rank)  # there may be an unread report of a whole checkpoint
                raise

    # --- events ---------------------------------------------------------------------------------------------------

    def _wait_for_event(self) -> None:
        """Wait for the next message, end of a process or signal, or until the deadline, and record it."""
        timeout_s = None if self._deadline_s is None else max(self._deadline_s - time.monotonic(), 0)
        ready = [(key.data, key.fileobj) for key, _ in self._selector.select(timeout_s) if key.data is not None]
        for rank, source in ready:
            if source is rank.line:
                self._receive(rank)
        ended = [rank for rank, source in ready if source == rank.end]
        # Of ranks that ended at the same moment, killed ones come first: they did not end because others did.
        for rank in sorted(ended, key=lambda rank: rank.exit_code() > 0):
            self._note_end(rank)

    def _receive(self, rank: _Rank) -> None:
        messages, is_open = control.received(rank.line)
        if not is_open and rank.line in self._selector.get_map():
            self._selector.unregister(rank.line)
        for message in messages:
            self._note(rank, message)

    def _note(self, rank: _Rank, message: Message) -> None:
        rank.reported[message.event] += 1
        match message.event:
            case "opens":
                self.has_pipeline = True
                if rank in self._suspects:  # its script continued after the error
                    self._suspects.remove(rank)
            case "fails":
                rank.failure = rank.failure or message.words
                self._suspect(rank)
            case "hangs":
                self._hang = message.words
            case "listens":
                self._requests.listens = True
            case "saves":
                self.saved.add(State(message.training, message.step))

    def _note_end(self, rank: _Rank) -> None:
        self._receive(rank)  # what it reported before
        self._selector.unregister(rank.end)
        self._running -= 1
        rank.code = rank.exit_code()
        if rank.code and rank.reported["lost"]:
            self._lost.append(rank)
        elif rank.code or rank.reported["opens"] > rank.reported["closes"]:
            self._suspect(rank)

    def _suspect(self, rank: _Rank) -> None:
        if rank not in self._suspects:
            self._suspects.append(rank)

    # --- decisions ------------------------------------------------------------------------------------------------

    def _check_for_failure(self) -> None:
        """Raise RankFailed if a rank has failed and it is clear which one failed first."""
        if self._hang is not None:
            raise RankFailed(f"the run hung ({self._hang})", is_hang=True)
        for event, what in (("joins", "joined the others"), ("opens", "made the pipeline that the others make")):
            most = max(rank.reported[event] for rank in self._ranks)
            for rank in self._ranks:
                if rank.code == 0 and rank.reported[event] < most:
                    raise RankFailed(f"{rank.name} ended with exit code 0 before it {what}")
        if not any(rank.code for rank in self._ranks):
            return
        first = (self._suspects + self._lost)[0]
        if first in self._lost or first.code is None:  # another rank may have failed first, or may yet print its error
            if self._deadline_s is None:
                self._deadline_s = time.monotonic() + _FIRST_FAILURE_S
            if self._running and time.monotonic() < self._deadline_s:
                return
        raise RankFailed(first.to_text())

    def _handle_signal(self, number: signal.Signals) -> None:
        """Pass a signal to this process on if the script ends by itself when asked to; otherwise end all ranks."""
        if number == signal.SIGINT:
            raise KeyboardInterrupt(*([] if self.has_pipeline else [_NO_PIPELINE]))
        asked, may_ask = self._requests.asked, number in (signal.SIGTERM, signal.SIGUSR1)
        if may_ask and asked is None and self._requests.listens:
            self._requests.asked = number
            with suppress(OSError):  # it has ended
                self._ranks[0].line.send(control.STOP, socket.MSG_DONTWAIT)
            return
        why = ""
        if may_ask:
            not_asked = "the script has not read pipeline.should_stop" if self.has_pipeline else _NO_PIPELINE
            why = ", the second signal" if asked else f": {not_asked}"
        if asked is None:  # ranks that were asked before would wait for the end of a step
            self._terminate()
        raise EndedBySignal(number, why)

    # --- the end --------------------------------------------------------------------------------------------------

    def _terminate(self) -> None:
        """Send SIGTERM to all ranks, and wait for their handlers until another request comes."""
        for rank in self._ranks:
            if rank.code is None:
                signal.pidfd_send_signal(rank.end, signal.SIGTERM)
        self._deadline_s = time.monotonic() + _TERM_S
        while self._running and time.monotonic() < self._deadline_s and not self._requests.taken():
            self._wait_for_event()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Kill all ranks that are left, and all processes that they forked. Raises PipelineError if a rank stays."""
        for rank in self._ranks:
            rank.kill()
        deadline_s = time.monotonic() + _GONE_S
        left = [rank for rank in self._ranks if not rank.has_ended(deadline_s)]
        for rank in self._ranks:
            if rank not in left:
                os.waitpid(rank.pid, 0)
            os.close(rank.end)
            rank.line.close()
        self._selector.close()
        self._folder.guard([])
        if left:
            before = f"{error}; " if isinstance(error, RankFailed) else ""
            names = ", ".join(f"{rank.name} (process {rank.pid})" for rank in left)
            raise PipelineError(
                f"{before}{names} cannot be ended: a system call has not returned within {_GONE_S:g} s of SIGKILL; "
                f"look at the disks and devices in use there (dmesg), and start the run again when the process is gone"
            )


@final
class _Rank:
    """A rank's process, its reports, and how it ended."""

    def __init__(self, number: int, line: socket.socket, pid: int) -> None:
        self.name = f"rank {number}"
        self.line, self.pid = line, pid
        self.end = os.pidfd_open(pid)
        self.reported: Counter[str] = Counter()
        self.failure = ""
        self.code: int | None = None

    def to_text(self) -> str:
        """How it failed."""
        if self.code is None:
            return f"{self.name} failed ({self.failure})"
        if self.code == 0:
            return f"{self.name} ended with exit code 0 in the middle of its pipeline"
        how = f"exit code {self.code}"
        if (number := -self.code) > 0:
            how = signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"
        return f"{self.name} ended with {how}"

    def exit_code(self) -> int:
        """The exit code of an ended process, as `subprocess` gives it; does not reap the process."""
        status = os.waitid(os.P_PIDFD, self.end, os.WEXITED | os.WNOWAIT)
        assert status is not None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status

    def has_ended(self, until_s: float) -> bool:
        """Whether it ends before then (monotonic clock)."""
        poll = select.poll()
        poll.register(self.end, select.POLLIN)
        return bool(poll.poll(1000 * max(until_s - time.monotonic(), 0)))

    def kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):  # it may have no group of its own yet
            signal.pidfd_send_signal(self.end, signal.SIGKILL)


def _started(number: int, starter: Starter, environment: Mapping[str, str]) -> _Rank:
    with ExitStack() as stack:
        ours, theirs = control.make_pair()
        stack.callback(ours.close)
        with theirs:
            pid = starter({**environment, **control.environment_of(theirs.fileno(), os.getpid())}, theirs.fileno())
        stack.callback(os.waitpid, pid, 0)
        stack.callback(os.kill, pid, signal.SIGKILL)
        rank = _Rank(number, ours, pid)
        stack.pop_all()
    return rank


def in_new_interpreter(command: Sequence[str], environment: Mapping[str, str], file: int) -> int:
    """Start Python with the arguments `command`, as a `Starter`."""
    os.set_inheritable(file, True)
    return os.posix_spawn(sys.executable, [sys.executable, *command], environment, setsid=True)
