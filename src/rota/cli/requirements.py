"""Requirements of a command: usable values, and libraries, which are slow to import."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rota.core.errors import RotaError


class InputError(RotaError):
    """A file or value on the command line that cannot be used."""


def require(module: str, extra: str) -> None:
    """Import a module that an extra brings. Raises InputError, with the remedy, if it is not installed."""
    require_installed(module, extra)
    with exit_on_ctrl_c():
        importlib.import_module(module)


def require_installed(module: str, extra: str) -> None:
    """Raises InputError, with the remedy, if a module that an extra brings is not installed. Does not import it."""
    if importlib.util.find_spec(module) is None:
        raise InputError(f"this command needs {module}; install it with: pip install 'rota[{extra}]'")


def require_search() -> None:
    """Import the solver. Raises InputError if it is not installed."""
    for module in ("ortools", "numba"):
        require(module, "search")
    with exit_on_ctrl_c():
        import rota.search  # noqa: F401


@contextmanager
def exit_on_ctrl_c() -> Iterator[None]:
    """In the block, Ctrl-C ends the process at once with a message: run nothing in it that needs a clean-up.

    Some modules turn Ctrl-C into errors of their own while they are imported.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # another handler is installed
        return
    signal.signal(signal.SIGINT, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(*_: object) -> None:
    os.write(2, f"{' '.join(['rota', *sys.argv[1:2]])}: interrupted\n".encode())
    os._exit(130)
