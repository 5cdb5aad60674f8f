"""How arguments are read: as argparse does it, but for what it says when they are wrong."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, final


@final
class Parser(argparse.ArgumentParser):
    """Usage errors end with 2, in one line, with the nearest word that would have been right, or an example."""

    _words: Sequence[str] = ()  # what is being read

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses what it does not know: here, as only a command's own parser knows the command's options."""
        self._words = sys.argv[1:] if args is None else list(args)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse_misspelt(unknown)
            options = [word for word in unknown if word.startswith("-")]
            told = f"there is no option {options[0]}" if options else f"{unknown[0]!r} is one word too many"
            self.error(f"{told}; see {self.prog} --help")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        choice = re.fullmatch(r"argument (.+?): invalid choice: '?(.*?)'? \(choose from .*", message, re.DOTALL)
        # An option that is not known leaves its value behind, which then stands where another word belongs.
        if message.startswith("the following arguments are required") or (choice and not choice[1].startswith("-")):
            self._refuse_misspelt(self._words)
        if choice is not None:
            message = self._told_of_choice(*choice.groups())
        elif message.startswith("the following arguments are required"):
            message += self._example()
        self._end(message)

    def _refuse_misspelt(self, words: Sequence[str]) -> None:
        """Ends with the first unknown option among `words` that is much like a known one, if there is one."""
        known = [option[2:] for option in self._option_string_actions if option.startswith("--")]
        given = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
        for name in given:  # the beginning of an option's name is enough for argparse
            near = None if any(option.startswith(name) for option in known) else _nearest(name, known)
            if near is not None:
                self._end(f"there is no option --{name}; did you mean --{near}?")

    def _told_of_choice(self, name: str, wrong: str) -> str:
        choices = self._choices(name)
        near = _nearest(wrong, choices)
        hint = f"did you mean {near}?" if near else f"see {self.prog} --help"
        option = f"{name} " if name.startswith("-") else ""
        return f"{option}{wrong!r} is not one of {', '.join(choices)}; {hint}"

    def _choices(self, name: str) -> list[str]:
        """Of the argument that argparse's errors call so."""
        for action in self._actions:
            if name in ("/".join(action.option_strings), action.metavar, action.dest):
                return [str(choice) for choice in action.choices or ()]
        return []

    def _example(self) -> str:
        """The first one of the help."""
        _, _, examples = (self.epilog or "").partition("example:\n")
        return f"; for example: {examples.splitlines()[0].strip()}" if examples else ""

    def _end(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message}", file=sys.stderr)
        sys.exit(2)


def _nearest(wrong: str, choices: Iterable[str]) -> str | None:
    """What `wrong` was probably meant to be; 1F1B may be spelt as in rota.schedules.one_f_one_b."""
    wrong = wrong.lower()
    tries = (wrong, re.sub("(one|1)_f_(one|1)_?b", "1f1b", wrong))
    return next((near for word in tries for near in difflib.get_close_matches(word, choices, 1)), None)
