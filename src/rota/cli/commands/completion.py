"""`rota completion`: completes commands, options and their choices in the shell."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rota.cli.parser import Command, Parser, one_of

#: Completes words from a table by command, sub-command and the word before, and file names where there are none.
_BASH = """\
_rota() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} second= words
    [ "$COMP_CWORD" -gt 2 ] && second=${{COMP_WORDS[2]}}
    case "${{COMP_WORDS[1]}} $second $before" in
{cases}
    esac
    [ "$COMP_CWORD" -eq 1 ] && words={commands}
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _rota rota
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n" + _BASH

_SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rota completion` to its parser."""
    parser.add_argument("shell", type=one_of(_SHELLS), choices=_SHELLS, metavar="SHELL", help="bash, zsh or fish")


def run(arguments: Namespace) -> int:
    """Print the shell's script. Returns the exit code."""
    print(script(arguments.shell, arguments.commands), end="")
    return 0


def script(shell: str, commands: Sequence[Command]) -> str:
    """The script that makes `shell` complete these commands."""
    tables = [table for command in commands for table in _tables(command)]
    if shell == "fish":
        return _fish(commands, tables)
    cases = "\n".join(case for table in tables for case in _cases(table))
    names = shlex.quote(" ".join(command.name for command in commands))
    return (_ZSH if shell == "zsh" else _BASH).format(commands=names, cases=cases)


class _Table(NamedTuple):
    """What follows a command and maybe a sub-command: `choices` are those of their `Parser`."""

    words: tuple[str, ...]
    choices: Mapping[str, Sequence[str]]


def _tables(command: Command) -> list[_Table]:
    """The table of each sub-command, and then that of the command."""
    parser = Parser()
    command.add_arguments(parser)
    subs = [_Table((command.name, name), sub.choices) for name, sub in parser.sub_commands.items()]
    return [*subs, _Table((command.name,), parser.choices)]


def _cases(table: _Table) -> Iterator[str]:
    """Values of an option first, then the other words."""
    start = f'"{" ".join(table.words)} "*'
    for option, values in table.choices.items():
        if option and values:
            yield f'        {start}" {option}") words={shlex.quote(" ".join(values))} ;;'
    others = [*table.choices[""], *filter(None, table.choices)]
    yield f"        {start}) words={shlex.quote(' '.join(others))} ;;"


def _fish(commands: Sequence[Command], tables: Sequence[_Table]) -> str:
    lines = [
        f"complete -c rota -n __fish_use_subcommand -f -a {command.name} -d {shlex.quote(command.summary)}"
        for command in commands
    ]
    for table in tables:
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in table.words)
        for option, values in table.choices.items():
            words = shlex.quote(" ".join(values))
            what = f"-l {option[2:]}" + (f" -x -a {words}" if values else "") if option else f"-a {words}"
            lines += [f"complete -c rota -n {shlex.quote(seen)} {what}"] if option or values else []
    return "\n".join(lines) + "\n"


COMMAND = Command(
    "completion",
    "print a script that completes commands and options in bash, zsh or fish",
    "rota completion bash > ~/.local/share/bash-completion/completions/rota",
    add_arguments,
    run,
    details="""

Save it where your shell looks for completions, or evaluate it in ~/.bashrc or ~/.zshrc:

  eval "$(rota completion bash)"
  rota completion fish > ~/.config/fish/completions/rota.fish""",
)
