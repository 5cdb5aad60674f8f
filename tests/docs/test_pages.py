"""What the pages say is there: links, files, names in code, commands with their options, `make` targets."""

import ast
import importlib.util
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import ROOT
from support.pages import python_blocks, text_of
from support.parsing import options_of, parse

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*/README.md")])
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
TESTS = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))


def anchors(page: Path) -> set[str]:
    """As a code host makes them of the headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", text_of(page))
    for target in re.findall(r"\[[^]]*\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_files_that_are_named_exist(page: Path) -> None:
    pattern = r"`((?:docs|benchmarks|examples|tests|src/rota)/[\w./*-]+)`"
    if not page.name.startswith("coming-from"):  # those name files of other systems
        assert [name for name in re.findall(pattern, text_of(page)) if not any(ROOT.glob(name))] == []


def names_of_rota(tree: ast.AST) -> Iterator[str]:
    """Dotted names that begin with rota, and modules and names that are imported from it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id == "rota":
                yield ".".join(["rota", *reversed(parts)])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rota":
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name != "*")


def resolve(dotted: str) -> None:
    module, *rest = dotted.split(".")
    found = importlib.import_module(module)
    for i, name in enumerate(rest):
        if not hasattr(found, name):
            importlib.import_module(".".join([module, *rest[: i + 1]]))
        found = getattr(found, name)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_code_names_what_there_is(page: Path) -> None:
    for block in python_blocks(page):
        for name in names_of_rota(ast.parse(block)):
            resolve(name)


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.name)
def test_code_is_run_by_a_test(page: Path) -> None:
    assert f'"{page.name}' in TESTS, "no test reads this page, so nobody runs its code"


def commands(page: Path) -> Iterator[str]:
    """Lines of code blocks that begin with a command, continued lines joined, comments left out."""
    text = re.sub(r"\\\n\s*", "", text_of(page))
    for line in re.findall(r"^(?: {4}|)((?:rota|make|python|torchrun) .*)$", text, flags=re.MULTILINE):
        yield re.sub(r"( +#|   ).*$", "", line)  # without what is told beside it


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_are_understood(page: Path) -> None:
    for line in commands(page):
        words = shlex.split(line.rstrip("."))
        if words[0] == "rota" and "…" not in line and not words[1].endswith(":"):  # that is an output
            parse(words[1:])


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_in_the_text_exist(page: Path) -> None:
    for mention in re.findall(r"`(rota [^`\n]*)`", text_of(page)):
        _, *words = mention.split()
        if not words or not words[0].isascii() or words[0].startswith("-"):
            continue
        options = options_of(words[0])
        for word in words[1:]:
            option = word.split("=")[0].rstrip(",;.")
            if option.startswith("--"):
                assert option in options, mention


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for target in re.findall(r"(?:`|^ {4})make ([a-z-]+)", text_of(page), flags=re.MULTILINE):
        assert target in targets, target


def test_results_are_those_of_the_benchmarks() -> None:
    """Claims, and results where no output is recorded: `python benchmarks/results.py --claims` writes them."""
    spec = importlib.util.spec_from_file_location("benchmark_results", ROOT / "benchmarks" / "results.py")
    results = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(results)
    page = text_of("results.md")
    assert results.page_of(results.outputs_on_page()) == page
    for name in results.NAMES:
        (section,) = re.findall(rf"^## {name}\n(.*?)(?=^## |\Z)", page, flags=re.DOTALL | re.MULTILINE)
        assert results.claim_of(name) in section
        has_parts = (ROOT / "benchmarks" / name / "output.json").exists()
        assert ("**Output.**" in section, "**Measured in.**" in section) in (
            [(True, True)] if has_parts else [(True, False), (False, True)]
        )


def test_the_page_of_schedules_is_what_make_docs_writes() -> None:
    assert runpy.run_path(str(ROOT / "docs" / "make_schedules.py"))["page"]() == text_of("schedules.md")
