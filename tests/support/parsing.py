"""The commands of `rota`, and command lines that are parsed, but not run."""

from collections.abc import Iterator, Sequence
from unittest.mock import patch

import click

from rota.cli.command import Command
from rota.cli.main import COMMANDS, main, root

_CONTEXT = click.Context(root)


def commands(name: str) -> Iterator[tuple[str, Command]]:
    """The command of that name, or the commands in the group of that name."""
    command = root.get_command(_CONTEXT, name)
    if isinstance(command, Command):
        yield name, command
    elif isinstance(command, click.Group):
        yield from ((f"{name} {sub.name}", sub) for sub in command.commands.values() if isinstance(sub, Command))


#: By what the user types, such as "export megatron".
ALL = {words: command for name in COMMANDS for words, command in commands(name)}


def options_of(name: str) -> list[str]:
    """The long options of a command, or of those in a group."""
    long = [option for _, command in commands(name) for param in command.params for option in param.opts]
    return ["--help", *(option for option in long if option.startswith("--"))]


def parse(words: Sequence[str]) -> None:
    """Fail unless `rota` takes these words."""
    with patch.object(Command, "invoke", lambda *_: 0):
        assert main(words) == 0, words
