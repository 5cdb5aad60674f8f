"""`rota COMMAND …`: runs the command and reports errors."""

from __future__ import annotations

import codecs
import importlib
import io
import os
import sys
from collections.abc import Sequence

import click

from rota.cli.command import CONTEXT, Command
from rota.cli.requirements import exit_on_ctrl_c
from rota.cli.screen import ascii_form, note
from rota.core.errors import NothingFitsError, PipelineError, PlanError, RotaError, UsageError
from rota.core.reading import printable

_FIRST_COMMANDS = """Rota plans and runs pipeline-parallel training of PyTorch
models. Begin with these commands:

\b
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
_COMPLETE = "_ROTA_COMPLETE"
_BUFFER_BYTES = 2**24  # more than any command prints

#: The commands in the order of `rota --help`, each in the module of its name, which is imported when it is needed.
COMMANDS = (
    *("demo", "doctor", "autoplan", "profile", "plan", "plan-batch"),
    *("check", "show", "explain", "verify"),
    *("run", "compare", "calibrate", "export", "import", "checkpoint"),
)


class _Rota(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names."""
        return [*COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command, whose module is imported now."""
        if cmd_name in COMMANDS:
            name = {"import": "import_plan"}.get(cmd_name, cmd_name.replace("-", "_"))
            with exit_on_ctrl_c():
                command: click.Command = getattr(importlib.import_module(f"rota.cli.commands.{name}"), name)
            return command
        if ctx.resilient_parsing or cmd_name.startswith("-"):
            return None
        raise click.exceptions.NoSuchCommand(cmd_name, possibilities=COMMANDS, ctx=ctx)


@click.group(cls=_Rota, context_settings=CONTEXT, invoke_without_command=True, help=_FIRST_COMMANDS)
@click.option("--version", is_flag=True, help="print the version")
@click.pass_context
def root(context: click.Context, version: bool) -> None:
    """Print the version, or the first commands if there is none."""
    if version:
        import rota

        print(f"rota {rota.__version__}")
        context.exit()
    if context.invoked_subcommand is None:
        print(_FIRST_COMMANDS.replace("\b\n", ""), _MORE, sep="\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The words of the command line after `rota`; None: those of this process.

    Returns:
        The exit code: 0, 1 for a refused plan, a plan that does not fit, a failed run or output that could not be
        written, 2 for arguments, files or devices that cannot be used, 130 for Ctrl-C; `rota run` also returns 128 +
        the number of the signal that ended the run.
    """
    if argv is None:  # the process is this command's own
        if _COMPLETE in os.environ:
            root.main(prog_name="rota", complete_var=_COMPLETE)
        _buffer_output()
    codecs.register_error("ascii form", ascii_form)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="ascii form")
    code = _exit_code([*(sys.argv[1:] if argv is None else argv)])
    try:
        print(end="", flush=True)
    except OSError as error:
        return _lost_output(error) or code
    return code


def _buffer_output() -> None:
    """Let a command do its work, and write its files, before it can find out that nobody reads what it prints.

    Not `rota run`, whose ranks print as long as they train.
    """
    stream = sys.stdout
    if isinstance(stream, io.TextIOWrapper) and not stream.isatty() and sys.argv[1:2] != ["run"]:
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(stream.fileno(), "w", False), _BUFFER_BYTES))
        sys.stdout.reconfigure(encoding=stream.encoding)


def _lost_output(error: OSError) -> int:
    """Say that what was printed is lost, unless its reader has ended, as `head` does. Returns the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left to be flushed
    if isinstance(error, BrokenPipeError):
        return 0
    note("", f"error: cannot write standard output: {error.strerror}; the command has done its other work")
    return 1


def _exit_code(words: list[str]) -> int:
    """Run one command, and report errors in a line."""
    name: str | None = None
    try:
        with root.make_context("rota", words) as context:
            try:
                return int(root.invoke(context) or 0)
            finally:
                name = context.invoked_subcommand
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "rota"
        note(path.removeprefix("rota").strip(), f"error: {_usage_text(error, path)}")
        return 2
    except RotaError as error:
        message = "\n".join(map(printable, str(error).split("\n")))  # names of files in it may hold control characters
        note(name, f"{'refused' if isinstance(error, PlanError) else 'error'}: {message}")
        # Something was tried, and was refused or failed; otherwise, it is the arguments that must be changed.
        has_failed = isinstance(error, (PlanError, PipelineError, NothingFitsError))
        return 1 if has_failed and not isinstance(error, UsageError) else 2
    except BrokenPipeError as error:
        return _lost_output(error) or 1
    except KeyboardInterrupt as error:
        note(name, ": ".join(["interrupted", *map(str, error.args)]))
        return 130


def _usage_text(error: click.UsageError, path: str) -> str:
    """The error's message, with an example if something is missing, or else where to read more."""
    message = error.format_message().rstrip(".")
    command = error.ctx.command if error.ctx is not None else root
    if isinstance(error, click.MissingParameter) and isinstance(command, Command):
        return f"{message}; for example: {command.example.splitlines()[0]}"
    return message if ";" in message else f"{message}; see {path} --help"
