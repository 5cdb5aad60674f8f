"""`rota completion`: completes commands, options and their choices in the shell."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence

from rota.cli.parser import Command, Parser, one_of

#: Completes words from the table `rota_words`, and file names where there are none.
_BASH = """\
_rota() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} words
    if [ "$COMP_CWORD" -eq 1 ]; then words={commands}
    else case ${{COMP_WORDS[1]}} in
{cases}
    esac; fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _rota rota
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n" + _BASH

_SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rota completion` to its parser."""
    parser.add_argument("shell", type=one_of(_SHELLS), metavar="SHELL", help="bash, zsh or fish")


def run(arguments: Namespace) -> int:
    """Print the shell's script. Returns the exit code."""
    print(script(arguments.shell, arguments.commands), end="")
    return 0


def script(shell: str, commands: Sequence[Command]) -> str:
    """The script that makes `shell` complete these commands."""
    words = {command.name: _words(command) for command in commands}
    if shell == "fish":
        return _fish(commands, words)
    cases = "\n".join(f"        {name}) words={shlex.quote(' '.join(found))} ;;" for name, found in words.items())
    return (_ZSH if shell == "zsh" else _BASH).format(commands=shlex.quote(" ".join(words)), cases=cases)


def _fish(commands: Sequence[Command], words: Mapping[str, Sequence[str]]) -> str:
    lines = [
        f"complete -c rota -n __fish_use_subcommand -f -a {command.name} -d {shlex.quote(command.summary)}"
        for command in commands
    ]
    lines += [
        f"complete -c rota -n '__fish_seen_subcommand_from {name}' "
        + (f"-l {word[2:]}" if word.startswith("--") else f"-a {shlex.quote(word)}")
        for name, found in words.items()
        for word in found
    ]
    return "\n".join(lines) + "\n"


def _words(command: Command) -> list[str]:
    """A command's long options, and the schedules that `rota plan` takes."""
    from rota.cli.searching import SEARCH
    from rota.schedules import NAMED

    parser = Parser()
    command.add_arguments(parser)
    return [*([SEARCH, *NAMED] if command.name == "plan" else []), *parser.options]


COMMAND = Command(
    "completion",
    "print a script that completes commands and options in bash, zsh or fish",
    "rota completion bash >> ~/.bashrc",
    add_arguments,
    run,
    details="""

Save it where your shell looks for completions, or evaluate it in ~/.bashrc or ~/.zshrc:

  eval "$(rota completion bash)"
  rota completion fish > ~/.config/fish/completions/rota.fish""",
)
