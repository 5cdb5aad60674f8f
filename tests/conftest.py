"""What all tests share.

Property tests draw the same examples in every run, and none of them is timed. Ctrl-C can be tested anywhere.
"""

import gc
import importlib
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from support.chromium import chromium
from support.pool import Pool
from support.sampling import mark_sweeps

__all__ = ["chromium"]  # a fixture, here for all tests: one process can have only one Playwright

settings.register_profile("rota", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rota")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background; what tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


os.environ.pop("COLUMNS", None)  # reports are wrapped to it
importlib.import_module("rota")  # before any test imports numba, which reads a variable that rota sets


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest tests come first, so that no worker is left with one when the others have ended."""
    for item in items:
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.dist)
    mark_sweeps(items, are_whole_files=not any("::" in argument for argument in config.args))
    items.sort(key=lambda item: "test_sim_device.py" not in item.nodeid)


def pytest_sessionstart() -> None:
    """What is imported and collected stays: searching it for cycles, again and again, is in vain."""
    gc.disable()
    vars(importlib.import_module("rota.cli.screen"))["_EVERY_S"] = 1e6  # seconds: a busy machine adds no lines


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture
def time_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """To searches time is the work that they have counted: those with a limit find the same on a busy machine."""
    monkeypatch.setattr("rota.search.budget.Budget.elapsed_s", property(lambda budget: budget.spent_s))
    monkeypatch.setattr("rota.search.budget.Budget._after_s", 0.0)
    monkeypatch.setattr("rota.planning.request.Deadline.elapsed_s", 0.0)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four worker processes that stand by for the whole session."""
    pool = Pool(4)
    yield pool
    pool.remove()
