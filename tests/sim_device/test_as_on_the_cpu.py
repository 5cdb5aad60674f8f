"""Tests of the CPU, as they are, with pipelines on simulated devices: timelines, losses, boundaries, dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest

from support.pool import Pool
from support.sim_device.pool import SimPool

pytestmark = [pytest.mark.dist, pytest.mark.sweep]  # test_numbers and test_pipeline have a core of them

NAMES = ("boundaries", "losses", "plans_per_step", "timeline")
MODULES = [import_module(f"runtime.test_{name}") for name in NAMES]
#: What does not apply here, and why.
LEFT_OUT = {
    "test_a_loss_of_the_output_alone": "runs the unsplit model on the CPU with the stages that were moved",
    "test_each_span_holds_what_its_op_did_and_takes_no_less_than_that": "operations take many times longer here",
    "test_writing_into_what_is_received": "autograd lets only plain tensors be written to there",
    "test_writing_by_functions_into_what_is_received": "the same",
    "test_writing_into_what_is_received_and_recomputed_from_is_refused": "the same",
}
#: A gradient that was changed between two steps of a round may have been zeroed: the host looks.
ZEROED = ("loss_counts.py", "shared_weights.py")


@pytest.fixture(name="pool")
def simulated(pool: Pool) -> SimPool:
    return SimPool(pool, ZEROED)


def taken_over(modules: list[ModuleType]) -> Iterator[tuple[str, object]]:
    for module in modules:
        for name, test in vars(module).items():
            if name.startswith("test_") and callable(test) and name not in LEFT_OUT:
                yield name, test


globals().update(taken_over(MODULES))


def test_what_is_left_out_is_there() -> None:
    assert LEFT_OUT.keys() <= {name for module in MODULES for name in vars(module)}
