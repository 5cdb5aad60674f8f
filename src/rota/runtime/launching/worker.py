"""What `rota run` starts on each rank: it runs the user's script, and prints Rota's errors in one line.

python -m rota.runtime.launching.worker SCRIPT [ARGUMENT …]
"""

from __future__ import annotations

import importlib.util
import io
import linecache
import os
import signal
import sys
import traceback
from types import ModuleType, TracebackType
from typing import NoReturn

from rota.core.errors import LostRankError, RotaError
from rota.runtime import control
from rota.runtime.environment import end_with_parent
from rota.runtime.launcher_files import is_first_to_say, keep_sockets_in_run_folder, kept_script
from rota.runtime.process_group import meet_by_environment


def main() -> None:
    """Run the script of `sys.argv` as `__main__`, and report its error to the supervisor."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends a rank at once, even inside a wait
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # each line in one piece, so that lines of different ranks do not mix
            stream.reconfigure(line_buffering=True, write_through=False)
    sys.excepthook = _write_traceback
    end_with_parent(control.connect())
    meet_by_environment()
    keep_sockets_in_run_folder()
    script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))  # as `python SCRIPT` does
    rank = os.getpid()
    try:
        _run(script, kept_script())
    except BaseException as error:
        if os.getpid() == rank and not isinstance(error, Exception):
            raise
        code = _show(error, script)
        control.report("lost" if isinstance(error, LostRankError) else "fails", f"{type(error).__name__}: {error}")
        # Peers may be waiting for this rank: end at once, since cleaning up would wait for them.
        _end(code)
    if os.getpid() != rank:
        # The script forked this process. Only the rank may clean up its threads and connections, and report.
        _end(0)


def _run(script: str, text: bytes) -> None:
    """Run the text as `__main__`, as `python SCRIPT` does with a file."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = script
    lines = [*io.StringIO(importlib.util.decode_source(text))]
    linecache.cache[script] = len(text), None, lines, script  # for tracebacks, whatever is in the file by then
    exec(compile(text, script, "exec", dont_inherit=True), vars(main))


def _show(error: BaseException, script: str) -> int:
    """Write the error to standard error, unless another rank has written the same one; returns the exit code."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        _write_once(f"{error.code}\n")
    elif isinstance(error, RotaError):
        ours = os.path.abspath(script)
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if os.path.abspath(f.filename) == ours]
        place = f" ({script}:{lines[-1]})" if lines else ""
        _write_once(f"{error}{place}\n", f"rota: rank {os.environ.get('RANK', '?')}: ")
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    return 1


def _write_traceback(_type: type[BaseException], error: BaseException, _frames: TracebackType | None) -> None:
    """Instead of `sys.excepthook`; PyTorch's process groups wrap it in one that writes the rank before each line."""
    _write_once("".join(traceback.format_exception(error)))


def _write_once(text: str, prefix: str = "") -> None:
    """Write a text in one piece, so that lines of different ranks do not mix; each text once per run."""
    if is_first_to_say(text):
        sys.stderr.write(prefix + text)


def _end(code: int) -> NoReturn:
    """End the process without Python's clean-up."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
