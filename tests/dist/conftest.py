"""Every test in this folder starts or uses several processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dist.pool import Pool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.dist)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool(4)
    yield pool
    pool.remove()
