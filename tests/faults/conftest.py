"""Many faults, minutes of them: see `make test-faults`. One of each sort is in tests/dist/test_faults.py, too."""

from pathlib import Path

import pytest

from dist.conftest import pool

__all__ = ["pool"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.faults)
