"""The warm stand-by of a run: a process that has imported what ranks need, from which they are forked in milliseconds.

supervisor ── "fork", environment, socket ──▶ stand-by ── fork ──▶ (between) ── fork ──▶ rank
           ◀── its process id ──────────────           ◀───────────── its process id ───┘
           ◀── becomes its child, when (between) ends ───────────────────────────────────┘

The ranks are the supervisor's own children, so their exit codes, signals and process ids are handled as those of any
other child. The kernel hands them over because the supervisor is a "child subreaper" while it forks, and only then:
what a rank leaves behind is not its business.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, final

from rota.errors import PipelineError
from rota.runtime.large_copies import with_large_copies
from rota.runtime.launching.requests import Requests

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
MOST_BYTES = 1 << 18  # of a message
_AT_ONCE = 64  # ranks that one request forks
MOST_FILES = 2 * _AT_ONCE
#: Of what ranks import, what takes longest: PyTorch's optimizers load torch._dynamo at their first call.
_MODULES = ("rota.runtime.pipeline", "rota.runtime.materializing", "rota.runtime.spmd", "rota.models", "torch._dynamo")
STAND_BY = "the process that ranks are forked from"
_ANSWER_S = 30.0  # in which it forks ranks; a second is enough for 64
_GONE_S = 10.0  # after SIGKILL
_OF_RESTARTS = ("rota.runtime.checkpoints",)


@final
class StandByEndedError(PipelineError):
    """The stand-by has ended or does not answer, so that no rank can be forked from it."""


@final
class Forked:
    """A rank that was forked: a child of this process, with the part of `subprocess.Popen` that ranks need."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._is_reaped = False

    def wait(self) -> None:
        """Wait for its end, and reap it."""
        if not self._is_reaped:
            os.waitpid(self.pid, 0)
            self._is_reaped = True

    def kill(self) -> None:
        """End it at once."""
        if not self._is_reaped:
            os.kill(self.pid, signal.SIGKILL)


@final
class StandBy:
    """The stand-by process, as a context manager; on exit it is gone. Only on Linux.

    Args:
        environment: what the ranks have in common. Libraries read some variables when they are loaded.
        for_restarts: import also what only restarted ranks need at once.
        requests: signals to this process, which end a wait for the stand-by.
        report: called with one line if ranks have to wait for another stand-by.
    """

    def __init__(
        self, environment: Mapping[str, str], for_restarts: bool, requests: Requests, report: Callable[[str], None]
    ) -> None:
        self._environment = dict(environment)
        self.for_restarts = for_restarts
        self._requests, self._report = requests, report
        self._modules = _MODULES + (_OF_RESTARTS if for_restarts else ())
        self._stack = ExitStack()
        #: Whether it has imported everything.
        self.is_ready = False

    def __enter__(self) -> StandBy:
        self._start()
        return self

    def _start(self) -> None:
        with ExitStack() as stack:
            self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(self.line.close)
            module = "rota.runtime.launching.stand_by_process"
            with theirs:
                numbers = str(theirs.fileno()), str(os.getpid()), str(self.for_restarts)
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, *numbers, *self._modules],
                    env=with_large_copies(self._environment),
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            stack.callback(self.end)
            self._stack = stack.pop_all()

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        try:
            self._process.wait(_GONE_S)
        except subprocess.TimeoutExpired:
            self._report(f"{STAND_BY} (process {self.pid}) has not ended within {_GONE_S:g} s of SIGKILL")

    def replace(self, why: StandByEndedError | None = None) -> None:
        """Start another process, which will be ready later. `why` is reported: ranks have to wait for it."""
        if why is not None:
            self._report(f"{why}; ranks are started as soon as another one is ready")
        self._stack.close()
        self.is_ready = False
        self._start()

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its process group."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def has_message(self) -> bool:
        """Whether a message has come, or it has ended."""
        return self._is_readable(0)

    def _is_readable(self, timeout_s: float) -> bool:
        """Whether there is a message, after a wait that ends as soon as there is one, or a request to end."""
        poll = select.poll()  # not `select`, which takes no numbers above 1023: there is memory for as many ranks
        for file in (self.line, self._requests):
            poll.register(file.fileno(), select.POLLIN)
        return any(number == self.line.fileno() for number, _ in poll.poll(1000 * timeout_s))

    def note_ready(self) -> None:
        """Read its first message, which has come. Raises PipelineError if it cannot fork ranks."""
        num_threads = self._message()["threads"]
        if num_threads != 1:
            raise PipelineError(
                f"{STAND_BY} has {num_threads} threads after its imports; look at what sitecustomize and .pth files "
                f"import"
            )
        self.is_ready = True

    def fork(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        files: Sequence[Sequence[int]],
        handle_signals: Callable[[], None],
    ) -> list[Forked]:
        """One new child of this process per environment, each of which leads a session of its own.

        Args:
            command: a module, which runs as `python -m` would run it, and its arguments.
            environments: the children's variables; those that the stand-by has as well are not sent.
            files: for each child its socket, see `control`, and for all or none the memory that is kept for it.
            handle_signals: takes the requests that come meanwhile; what it raises ends the wait.

        Raises:
            PipelineError: the machine refuses to start one more process; none is left then.
            StandByEndedError: the stand-by has ended, or does not answer; no rank is left then.
            EndedBySignal, KeyboardInterrupt: a signal came; no rank is left then.
        """
        forked: list[Forked] = []
        try:
            for first in range(0, len(environments), _AT_ONCE):
                rows = slice(first, first + _AT_ONCE)
                of_rows = [file for row in files[rows] for file in row]
                forked += self._fork_some(command, environments[rows], of_rows, handle_signals)
            if len(forked) < len(environments):
                raise PipelineError(
                    f"process {len(forked)} of {len(environments)} cannot be started; start fewer, or raise the limit "
                    f"(ulimit -u)"
                )
        except BaseException:
            for each in forked:
                each.kill()
                each.wait()
            raise
        return forked

    def _fork_some(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        files: list[int],
        handle_signals: Callable[[], None],
    ) -> list[Forked]:
        of_ranks = [
            {name: value for name, value in environment.items() if self._environment.get(name) != value}
            for environment in environments
        ]
        request = json.dumps({"command": [*command], "environments": of_ranks}).encode()
        with _adopting():
            try:
                socket.send_fds(self.line, [request], files)
            except OSError as error:
                raise StandByEndedError(f"{STAND_BY} has ended") from error
            deadline_s = time.monotonic() + _ANSWER_S
            while not self._is_readable(max(deadline_s - time.monotonic(), 0)):
                handle_signals()
                if time.monotonic() > deadline_s:
                    self.end()  # it might answer later
                    raise StandByEndedError(f"{STAND_BY} has not answered within {_ANSWER_S:g} s")
            pids: list[int] = self._message()["pids"]
        return [Forked(pid) for pid in pids if pid]

    def _message(self) -> dict[str, Any]:
        """Its next message, which has come."""
        with suppress(OSError):
            if data := self.line.recv(MOST_BYTES):
                message: dict[str, Any] = json.loads(data)
                return message
        raise StandByEndedError(f"{STAND_BY} has ended")


@contextmanager
def _adopting() -> Iterator[None]:
    """Inside, processes whose parent ends become this process's children, if they descend from it."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)
