"""Sizes as options take them, and counts as people write them."""

from __future__ import annotations

import pytest

from rota.cli.common import parse_memory
from rota.core.text import count_text, exact_size_text


@pytest.mark.parametrize("num_bytes", [1, 999, 1000, 1500, 4_003_000, 70 * 10**9, 3 * 10**12, 10**15])
def test_an_exact_size_is_read_back(num_bytes: int) -> None:
    assert parse_memory(exact_size_text(num_bytes)) == num_bytes
    assert exact_size_text(70 * 10**9) == "70GB"


@pytest.mark.parametrize(("number", "text"), [(0, "0 plans"), (1, "1 plan"), (2000, "2,000 plans")])
def test_counts_are_as_people_write_them(number: int, text: str) -> None:
    assert count_text(number, "plan") == text
