"""The reference of the site has every public name, once."""

from __future__ import annotations

import re
import runpy
from collections import Counter
from inspect import isfunction
from pathlib import Path
from types import SimpleNamespace

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


def test_a_picture_with_a_dark_version_is_replaced_by_it_in_the_dark_theme(tmp_path: Path) -> None:
    change = runpy.run_path(str(ROOT / "docs" / "site_hooks.py"))["on_page_markdown"]
    (tmp_path / "both.dark.png").touch()
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md", abs_src_path=str(tmp_path / "index.md")))
    changed = change("![two](both.png) ![one](light.png)", page, SimpleNamespace(nav=[]))
    assert changed == "![two](both.png#only-light)![two](both.dark.png#only-dark) ![one](light.png)"
    for picture in (ROOT / "docs" / "pictures").glob("*.dark.png"):
        assert picture.with_name(picture.name.replace(".dark", "")).exists()
