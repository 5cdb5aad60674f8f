"""The reference of the site has every public name, once."""

from __future__ import annotations

import re
from collections import Counter
from inspect import isfunction

import rota
from rota import schedules
from support import ROOT

ROOMS = {"drawing", "interop", "schedules", "shapes"}  # each on a page as a whole


def test_the_reference_has_all_public_names() -> None:
    pages = sorted((ROOT / "docs" / "api").glob("*.md"))
    named = Counter(name for page in pages for name in re.findall(r"^::: rota\.(\w+)$", page.read_text(), flags=re.M))
    assert set(named) - ROOMS == set(rota.__all__) - ROOMS - {"__version__"}
    assert set(named) >= ROOMS
    assert max(named.values()) == 1


def test_the_reference_has_all_schedules() -> None:
    """Each by its own file: a file may be named as its function, which the reference of the package would not show."""
    page = (ROOT / "docs" / "api" / "schedules.md").read_text()
    named = re.findall(r"^::: rota\.schedules\.\w+\.(\w+)$", page, flags=re.M)
    functions = {name for name in schedules.__all__ if isfunction(getattr(schedules, name))}
    assert Counter(named) == Counter(functions - {"compare_schedules"})
