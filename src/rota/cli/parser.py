"""argparse with better errors: one line that names the nearest correct word, or an example."""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NoReturn, final


@final
@dataclass(frozen=True, slots=True)
class Command:
    """One sub-command.

    `name` is what the user types, `summary` its line in the help. `rota NAME --help` shows summary, `details` and
    `example`. `add_arguments` declares the arguments on the sub-command's parser; `run` returns the exit
    code (None: the command has sub-commands, which have it).
    """

    name: str
    summary: str
    example: str
    add_arguments: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int] | None = None
    details: str = ""


@final
class UnknownChoiceError(Exception):
    """A word that is not among an argument's choices. argparse lets it through to `Parser.parse_known_args`."""

    def __init__(self, option: str, wrong: str, choices: Iterable[str]) -> None:
        super().__init__(wrong)
        self.option, self.wrong, self.choices = option, wrong, tuple(choices)


def one_of(choices: Iterable[str], option: str = "", *, any_case: bool = False) -> Callable[[str], str]:
    """An argument type that accepts only these words; `option` is the argument's name unless it is positional."""
    known = tuple(choices)

    def parse(text: str) -> str:
        word = text.lower() if any_case else text
        if word not in known:
            raise UnknownChoiceError(option, word, known)
        return word

    return parse


@final
class Parser(argparse.ArgumentParser):
    """Errors of usage end the process with exit code 2 and one line on standard error.

    A sub-command's arguments are declared when the sub-command is parsed, so an error there breaks no other command.
    """

    def __init__(self, *, add_arguments: Callable[[Parser], None] | None = None, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, exit_on_error=False, **options)
        self._add_arguments = add_arguments
        self._commands: dict[str, Parser] = {}
        self._words: Sequence[str] = ()  # what is being parsed

    def add_commands(self, commands: Iterable[Command], metavar: str, dest: str, required: bool = False) -> None:
        """Declare sub-commands; the chosen one's `run` becomes the namespace's `function`."""
        subparsers = self.add_subparsers(metavar=metavar, dest=dest, required=required)
        for command in commands:
            heading = "examples" if "\n" in command.example else "example"
            sub = subparsers.add_parser(
                command.name,
                help=command.summary,
                description=f"{command.summary[0].upper()}{command.summary[1:]}.{command.details}",
                epilog=f"{heading}:\n  {command.example}",
                add_arguments=command.add_arguments,
            )
            if command.run is not None:
                sub.set_defaults(function=command.run)
            self._commands[command.name] = sub

    @property
    def sub_commands(self) -> dict[str, Parser]:
        """The parsers of the sub-commands, with their arguments declared."""
        for parser in self._commands.values():
            parser._declare()
        return self._commands

    @property
    def options(self) -> list[str]:
        """The long options of this parser. This is the only use of a private part of argparse."""
        return [option for option in self._option_string_actions if option.startswith("--")]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown words here, because only a command's own parser knows the command's options."""
        self._declare()
        self._words = sys.argv[1:] if args is None else list(args)
        try:
            self._check_command()
            found, unknown = super().parse_known_args(args, namespace)
        except UnknownChoiceError as error:
            self._end_with_choices(error)
        except argparse.ArgumentError as error:
            if error.argument_name is None:
                self.error(error.message)
            self._end(str(error))
        if unknown:
            self._refuse_misspelt(unknown)
            options = [word for word in unknown if word.startswith("-")]
            what = f"there is no option {options[0]}" if options else f"{unknown[0]!r} is an unexpected argument"
            self._end(f"{what}; see {self.prog} --help")
        return found, unknown

    def format_help(self) -> str:
        """The help, with its description and examples wrapped to the terminal's width, as argparse wraps the rest."""
        width = shutil.get_terminal_size().columns - 2
        texts = self.description, self.epilog
        self.description, self.epilog = (text and _wrapped(text, width) for text in texts)
        try:
            return super().format_help()
        finally:
            self.description, self.epilog = texts

    def _declare(self) -> None:
        if self._add_arguments is not None:
            self._add_arguments(self)
            self._add_arguments = None

    def _check_command(self) -> None:
        """The first word that is not an option must be a sub-command, if there are any."""
        first = next((word for word in self._words if not word.startswith("-")), None)
        if self._commands and first is not None and first not in self._commands:
            raise UnknownChoiceError("", first, self._commands)

    def error(self, message: str) -> NoReturn:
        """Report an error that argparse assigns to no single argument: a required one is missing."""
        self._refuse_misspelt(self._words)
        _, _, examples = (self.epilog or "").partition(":\n")
        self._end(message + (f"; for example: {examples.splitlines()[0].strip()}" if examples else ""))

    def _end_with_choices(self, error: UnknownChoiceError) -> NoReturn:
        if not error.option:  # an unknown option leaves its value where a positional argument belongs
            self._refuse_misspelt(self._words)
        near = _nearest(error.wrong, error.choices)
        hint = f"did you mean {near}?" if near else f"see {self.prog} --help"
        self._end(f"{error.option} {error.wrong!r} is not one of {', '.join(error.choices)}; {hint}".strip())

    def _refuse_misspelt(self, words: Sequence[str]) -> None:
        """Report the first unknown option among `words` that resembles a known one, if any does."""
        known = [option.removeprefix("--") for option in self.options]
        given = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
        for name in given:  # argparse accepts the beginning of an option's name
            near = None if any(option.startswith(name) for option in known) else _nearest(name, known)
            if near is not None:
                self._end(f"there is no option --{name}; did you mean --{near}?")

    def _end(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message}", file=sys.stderr)
        sys.exit(2)


def _wrapped(text: str, width: int) -> str:
    """Paragraphs in lines of at most `width` characters; indented lines are commands, which a backslash continues."""
    lines: list[str] = []
    for is_kept, group in groupby(text.split("\n"), key=lambda line: line[:1] in ("", " ")):
        paragraph = list(group)
        lines += [_command(line, width) for line in paragraph] if is_kept else textwrap.wrap(" ".join(paragraph), width)
    return "\n".join(lines)


def two_columns(texts: Mapping[str, str]) -> str:
    """Each name with its text beside it, wrapped to the terminal's width: a description of a group of arguments."""
    indent = " " * (max(map(len, texts)) + 2)
    width = shutil.get_terminal_size().columns - 4  # argparse indents descriptions by 2
    return "\n".join(
        textwrap.fill(text, width, initial_indent=name.ljust(len(indent)), subsequent_indent=indent)
        for name, text in texts.items()
    )


def _command(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    kept_together = re.sub(r"( --?[\w-]+) (?!-)", "\\1\N{NO-BREAK SPACE}", line)  # an option and its value
    parts = textwrap.wrap(
        kept_together, width - 2, subsequent_indent="      ", break_long_words=False, break_on_hyphens=False
    )
    return " \\\n".join(parts).replace("\N{NO-BREAK SPACE}", " ")


def _nearest(wrong: str, choices: Iterable[str]) -> str | None:
    """The choice that `wrong` probably stands for; 1F1B may be spelt as in rota.schedules.one_f_one_b."""
    wrong = wrong.lower()
    tries = (wrong, re.sub("(one|1)_f_(one|1)_?b", "1f1b", wrong))
    return next((near for word in tries for near in difflib.get_close_matches(word, choices, 1)), None)
