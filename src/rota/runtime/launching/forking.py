"""Forks ranks from the supervisor, which has imported what they need: that takes seconds, and a fork milliseconds.

The supervisor has one thread, no process group and no device, so a rank begins as a new process does. It leads a
session of its own, and inherits of the supervisor neither files nor handlers of signals.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

from rota.core.errors import PipelineError
from rota.runtime.environment import end_with_parent
from rota.runtime.launching.requests import Requests

#: Of what ranks import, what takes longest: PyTorch's optimizers load torch._dynamo at their first call.
MODULES = (
    *("rota.runtime.pipeline", "rota.runtime.materializing", "rota.runtime.spmd", "rota.runtime.checkpoints"),
    *("rota.models", "torch._dynamo"),
)


def import_for_ranks(environment: Mapping[str, str]) -> None:
    """Import what ranks need into this process, which then has one thread. Raises PipelineError if it has more.

    `environment`: the ranks' variables, of which libraries read some when they are loaded.
    """
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder, or that of the command: neither is the script's
    own, on_ctrl_c = dict(os.environ), signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # some modules would turn Ctrl-C into errors of their own
        _set_environment(environment)
        for module in MODULES:
            importlib.import_module(module)
    finally:
        _set_environment(own)
        signal.signal(signal.SIGINT, on_ctrl_c)
    if (num_threads := len(os.listdir("/proc/self/task"))) != 1:
        raise PipelineError(
            f"this process has {num_threads} threads after its imports, so no rank can be forked from it; look at what "
            f"sitecustomize and .pth files import"
        )
    gc.collect()
    gc.freeze()  # otherwise each rank's first collection writes to all pages, which copies them


def fork(requests: Requests, module: str, arguments: Sequence[str], environment: Mapping[str, str], file: int) -> int:
    """Fork a process that runs a module as `python -m` does, and that keeps this open `file` alone; returns its id."""
    supervisor = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or both processes would write what is buffered
    with requests.delayed():
        pid = os.fork()
        if not pid:
            try:
                os.setsid()
                requests.release()
                end_with_parent(supervisor)
                _close_all_but(file)
            except BaseException:
                os._exit(1)
    if not pid:
        _be_rank(module, arguments, environment)
    return pid


def _close_all_but(file: int) -> None:
    """By their numbers: the supervisor's objects, which would close them, are never freed here."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number != file:
            with suppress(OSError):  # that of the listing itself
                os.close(number)


def _be_rank(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run the module, then end as Python does: it never returns to the supervisor's code, which must not clean up."""
    code = 1
    try:
        _set_environment(environment)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # without what the command line has put around them
        if (numpy := sys.modules.get("numpy.random")) is not None:
            numpy.seed()  # or all ranks would draw the same numbers
        sys.argv = [module, *arguments]
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as error:
            if error.code is None or isinstance(error.code, int):
                code = (error.code or 0) & 0xFF
            else:
                print(error.code, file=sys.stderr)
        except BaseException as error:
            sys.last_value = error
            sys.excepthook(type(error), error, error.__traceback__)
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
        atexit._run_exitfuncs()
        _flush_files()
    finally:
        os._exit(code)


def _flush_files() -> None:
    """Python closes them when it frees everything at its end, as this process does not."""
    for file in gc.get_objects():
        if type(file) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom) and not file.closed:
            with suppress(OSError, ValueError):
                file.flush()


def _set_environment(environment: Mapping[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
