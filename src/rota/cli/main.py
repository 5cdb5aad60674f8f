"""`rota COMMAND …`: parses the arguments, runs the command and reports errors."""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Sequence

from rota.cli import files
from rota.cli.commands import COMMANDS
from rota.cli.parser import Parser
from rota.cli.requirements import exit_on_ctrl_c
from rota.cli.screen import ascii_form, keep_working_unread
from rota.errors import NothingFitsError, PipelineError, PlanError, RotaError, UsageError
from rota.reading import printable

_FIRST_COMMANDS = """Rota plans and runs pipeline-parallel training of PyTorch
models. Begin with these commands:

take a quick tour on this machine:
  rota demo
make a plan for your model:
  rota autoplan model.py --ranks 4 --pipeline 4 \\
    --batch 32 -o plan.json
look at the plan:
  rota show plan.json
train as planned:
  rota run --timeline measured.json plan.json train.py
see why ranks were idle:
  rota explain measured.json
"""
_MORE = "`rota --help` lists all commands.\n`rota COMMAND --help` explains one command."


def make_parser() -> Parser:
    """The parser of `rota` with all its commands."""
    parser = Parser(prog="rota", description=_FIRST_COMMANDS)
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_commands(COMMANDS, metavar="COMMAND", dest="command")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The words of the command line after `rota`; None: those of this process.

    Returns:
        The exit code: 0, 1 for a refused plan, a plan that does not fit or a failed run, 2 for arguments, files or
        devices that cannot be used, 130 for Ctrl-C; `rota run` also returns 128 + the number of the signal that ended
        the run.
    """
    if argv is None:  # the process is this command's own: what it measures lies in memory as in a run
        from rota.runtime.host_memory import HUGE_PAGES

        os.environ.update(HUGE_PAGES | os.environ)
        keep_working_unread()
    codecs.register_error("ascii form", ascii_form)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="ascii form")
    with exit_on_ctrl_c():
        parser = make_parser()
        given = parser.parse_args(argv)
    if given.version:
        import rota

        print(f"rota {rota.__version__}")
        return 0
    if given.command is None:
        print(f"{_FIRST_COMMANDS}\n{_MORE}")
        return 0
    try:
        files.refuse_outputs(given)
        return int(given.function(given))
    except RotaError as error:
        what = "refused" if isinstance(error, PlanError) else "error"
        print(f"rota {given.command}: {what}: {_shown(error)}", file=sys.stderr)
        return 1 if _is_failure(error) else 2
    except KeyboardInterrupt as error:
        print(f"rota {given.command}: interrupted", *error.args, sep=": ", file=sys.stderr)
        return 130


def _is_failure(error: RotaError) -> bool:
    """Whether something was tried, and was refused or failed; otherwise, it is the arguments that must be changed."""
    return isinstance(error, (PlanError, PipelineError, NothingFitsError)) and not isinstance(error, UsageError)


def _shown(error: RotaError) -> str:
    """The error's message; names of files in it may hold control characters."""
    return "\n".join(map(printable, str(error).split("\n")))
