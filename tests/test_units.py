"""Sizes as options take them."""

from __future__ import annotations

import pytest

from rota.cli.arguments import parse_memory
from rota.units import exact_size_text


@pytest.mark.parametrize("num_bytes", [1, 999, 1000, 1500, 4_003_000, 70 * 10**9, 3 * 10**12, 10**15])
def test_an_exact_size_is_read_back(num_bytes: int) -> None:
    assert parse_memory(exact_size_text(num_bytes)) == num_bytes
    assert exact_size_text(70 * 10**9) == "70GB"
