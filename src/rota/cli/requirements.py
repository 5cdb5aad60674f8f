"""What a command needs before it can work: values it can use, and the extras that bring its libraries."""

from __future__ import annotations

import importlib
import importlib.util

from rota.cli.interrupts import exit_on_ctrl_c
from rota.errors import RotaError


class InputError(RotaError):
    """A file or value on the command line that cannot be used."""


def require(module: str, extra: str) -> None:
    """Import a module that an extra brings. Raises InputError, with the remedy, if it is not installed."""
    if importlib.util.find_spec(module) is None:
        raise InputError(f"this needs {module}; install it by: pip install 'rota[{extra}]'")
    with exit_on_ctrl_c():
        importlib.import_module(module)


def require_search() -> None:
    """Import the solver. Raises InputError if it is not installed."""
    for module in ("ortools", "numba"):
        require(module, "search")
    with exit_on_ctrl_c():
        import rota.search  # noqa: F401
