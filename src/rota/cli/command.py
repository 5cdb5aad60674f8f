"""Commands: click's, which give their function one object with the values of all options."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, TypeVar

import click

from rota.cli import files

#: The values of a command's arguments and options, by name.
Options = SimpleNamespace
Function = Callable[[Options], "int | None"]
Decorated = TypeVar("Decorated", bound=Callable[..., Any])
Decorator = Callable[[Decorated], Decorated]

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


class Output(click.Option):
    """An option that names what a command writes; `writes` says what that is, or how it follows from the options."""

    def __init__(self, *args: Any, writes: files.WrittenBy = "file", **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.writes = writes


class Command(click.Command):
    """A command that refuses outputs that it cannot write before any work, and shows an example in its help."""

    def __init__(
        self, name: str, *, help: str, example: str, glossary: Mapping[str, str] | None = None, **settings: Any
    ) -> None:
        super().__init__(name, help=help, short_help=_summary(help), **settings)
        self.example, self.glossary = example, glossary or {}

    def invoke(self, ctx: click.Context) -> int:
        """Run the command. Returns the exit code."""
        assert self.callback is not None
        outputs = {param.name: param.writes for param in self.params if isinstance(param, Output)}
        options = Options(**ctx.params)
        files.refuse_outputs(self.name or "", outputs, options)
        with ctx:
            return self.callback(options) or 0

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the glossary and the example, wrapped as commands are: with a backslash at the end of a line."""
        if self.glossary:
            with formatter.section("Schedules"):
                formatter.write_dl([*self.glossary.items()])
        with formatter.section("Example"):
            for line in self.example.split("\n"):
                formatter.write("".join(f"  {part}\n" for part in _wrapped(line.strip(), formatter.width - 4)))


class Group(click.Group):
    """Sub-commands in the order of their definition."""

    def __init__(self, name: str, *, help: str, **settings: Any) -> None:
        settings |= {"no_args_is_help": False, "short_help": _summary(help), "context_settings": CONTEXT}
        super().__init__(name, help=help, **settings)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names."""
        return [*self.commands]


class Value(click.ParamType[Any, Any]):
    """A type whose values `parse` makes of a text; it raises ValueError with the remedy."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return what the text means."""
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


class WholeNumber(click.IntRange):
    """A whole number in a range."""

    name = "whole number"  # in errors


class Choice(click.Choice[str]):
    """One of a few words, in any case; the error names the nearest."""

    def __init__(self, choices: Iterable[str]) -> None:
        super().__init__([*choices], case_sensitive=False)

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:  # noqa: ARG002
        """Return the error for an unknown word; 1F1B may be spelt as in rota.schedules.one_f_one_b."""
        word = value.lower()
        words = word, re.sub("(one|1)_f_(one|1)_?b", "1f1b", word)
        near = next((near for word in words for near in difflib.get_close_matches(word, self.choices, 1)), None)
        hint = f"; did you mean {near}?" if near else ""
        return f"{value!r} is not one of {', '.join(self.choices)}{hint}"


def command(
    example: str,
    *,
    name: str | None = None,
    group: click.Group | None = None,
    interspersed: bool = True,
    glossary: Mapping[str, str] | None = None,
) -> Callable[[Function], Command]:
    """A decorator that makes a command of a function, whose docstring is the help; `name` is by default the function's.

    The help shows the command lines of `example`, and `glossary`, the words that an argument may be, with what they
    mean. `interspersed`: whether options may come after the arguments.
    """

    def decorate(function: Function) -> Command:
        settings = CONTEXT | {"allow_interspersed_args": interspersed}
        cli_command = click.command(
            name or function.__name__, Command, example=example, glossary=glossary, context_settings=settings
        )(function)
        if group is not None:
            group.add_command(cli_command)
        return cli_command

    return decorate


def combined(*decorators: Decorator[Any]) -> Decorator[Any]:
    """Several options as one decorator; the help shows them in this order."""

    def decorate(function: Any) -> Any:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def _summary(help: str) -> str:
    """The first sentence, for the list of commands."""
    return help.partition("\n")[0].removesuffix(".")


def _wrapped(line: str, width: int) -> list[str]:
    """A command in lines of at most `width` characters; an option and its value stay together."""
    if len(line) <= width:
        return [line]
    unbroken = re.sub(r"( --?[\w-]+) (?!-)", "\\1\N{NO-BREAK SPACE}", line)
    indent = " " * 4
    lines = textwrap.wrap(unbroken, width - 2, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [part.replace("\N{NO-BREAK SPACE}", " ") for part in (*(f"{part} \\" for part in lines[:-1]), lines[-1])]
