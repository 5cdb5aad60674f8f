"""How much `make test` runs of what sweeps over many cases; `make test-sweep` runs all of it."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

IS_WHOLE = "ROTA_WHOLE_SWEEPS" in os.environ
MOST_RANKS = 8 if IS_WHOLE else 6  # that schedules are tried on
#: Tests with parameters, of which `make test` leaves these out: it runs the same test with others.
LEFT_OUT = Path(__file__).parents[1] / "left_out.txt"


def some(number: int) -> int:
    """Of so many drawn cases a quarter, and five or more; all of them in `make test-sweep`."""
    return number if IS_WHOLE else min(number, max(number // 4, 5))


def swept(*values: Any) -> Any:
    """Parameters with which a test is part of the sweep alone."""
    return pytest.param(*values, marks=pytest.mark.sweep)


def microbatches(num_ranks: int) -> list[int]:
    """Few, many, and those around one and two for each rank, where the phases of a schedule begin and end."""
    return sorted({1, 2, 24, *range(num_ranks - 1, num_ranks + 2), *range(2 * num_ranks - 1, 2 * num_ranks + 2)} - {0})


def mark_sweeps(items: Collection[pytest.Item], *, are_whole_files: bool) -> None:
    """Gives the mark `sweep` to the tests of LEFT_OUT, and `sampled` to those of files that use `some` or `IS_WHOLE`.

    Raises:
        pytest.UsageError: a name in LEFT_OUT is no test's, or no parameters of a test are left for `make test`.
    """
    names = {line for line in LEFT_OUT.read_text().splitlines() if line and not line.startswith("#")}
    left = set()
    for item in items:
        if any(hasattr(getattr(item, "module", None), name) for name in ("some", "IS_WHOLE")):
            item.add_marker(pytest.mark.sampled)
        if item.nodeid in names:
            item.add_marker(pytest.mark.sweep)
        elif item.get_closest_marker("sweep") is None:
            left.add(without_parameters(item.nodeid))
    if are_whole_files:
        found = {item.nodeid for item in items}
        files = {item.nodeid.partition("::")[0] for item in items}
        for name in names:
            if name.partition("::")[0] in files and (name not in found or without_parameters(name) not in left):
                raise pytest.UsageError(f"{LEFT_OUT.name}: {name} is no test, or `make test` runs nothing of it")


def without_parameters(name: str) -> str:
    """The test without its parameters."""
    return name.partition("[")[0]
