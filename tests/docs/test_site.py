"""The reference of the site has every public name, once."""

import pydoc
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from inspect import isclass, isfunction
from typing import Any, get_args, get_type_hints

import rota
from rota import schedules
from rota.planning import Answer
from support import ROOT

ROOMS = {"drawing", "interop", "schedules", "shapes"}  # each on a page as a whole


def test_the_reference_has_all_public_names() -> None:
    pages = sorted((ROOT / "docs" / "api").glob("*.md"))
    named = Counter(name for page in pages for name in re.findall(r"^::: rota\.(\w+)$", page.read_text(), flags=re.M))
    assert set(named) - ROOMS == set(rota.__all__) - ROOMS - {"__version__"}
    assert set(named) >= ROOMS
    assert max(named.values()) == 1


def test_the_reference_has_what_public_functions_return_and_public_classes_hold() -> None:
    pages = (ROOT / "docs" / "api").glob("*.md")
    named = {name for page in pages for name in re.findall(r"^::: (rota\.[\w.]+)$", page.read_text(), flags=re.M)}
    public = {name: getattr(rota, name) for name in {*rota.__all__} - ROOMS - {"__version__"}}
    there = [*public.values(), *map(pydoc.locate, named)]
    found = {each for thing in public.values() for each in types_from(thing)}
    assert {f"{each.__module__}.{each.__qualname__}" for each in found if each not in there} == set()
    assert Answer in found  # of autoplan


def types_from(thing: Any) -> Iterator[type]:
    """Rota's classes that a function returns, and those of a class's attributes, properties and methods."""
    things = [thing]
    if isclass(thing):
        members = [member for name, member in vars(thing).items() if not name.startswith("_")]
        things += [getattr(member, "__func__", getattr(member, "fget", member)) for member in members]
    for each in things:
        with suppress(NameError, TypeError):  # of what is imported for types only, and no functions
            hints = get_type_hints(each)
            yield from classes_in([hints.get("return")] if isfunction(each) else hints.values())


def classes_in(hints: Iterable[Any]) -> Iterator[type]:
    for hint in hints:
        if isinstance(hint, type) and hint.__module__.startswith("rota.") and not hint.__name__.startswith("_"):
            yield hint
        yield from classes_in(get_args(hint))


def test_the_reference_has_all_schedules() -> None:
    """Each by its own file: a file may be named as its function, which the reference of the package would not show."""
    page = (ROOT / "docs" / "api" / "planning.md").read_text()
    named = re.findall(r"^::: rota\.schedules\.\w+\.(\w+)$", page, flags=re.M)
    functions = {name for name in schedules.__all__ if isfunction(getattr(schedules, name))}
    assert Counter(named) == Counter(functions - {"compare_schedules"})
