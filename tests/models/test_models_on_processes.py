"""Unmodified models on two and four processes: three optimizer steps are those of the whole model, to 1e-10 in fp64.

Compared are the losses, every gradient and every parameter after each step, buffers, and then the loss and all outputs
in evaluation. The batches have other lengths in each step than the example, and padding. `make test` runs a core;
`make test-models` runs everything.

The whole model is trained on the same micro-batches. So CLIP's contrastive loss compares the rows of one micro-batch,
and BatchNorm (ResNet) takes its statistics from one micro-batch, which is what a pipeline promises.
"""

from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from support.hf_models import CASES
from support.model_runs import PLANS, Run, differences, make_plan, resumed
from support.pool import Pool

TOLERANCE = 1e-10
BLOCKS_FOR = {2: None, 4: 8}  # eight stages need eight blocks


def plans_of(name: str) -> list[str]:
    """All, but where BatchNorm writes to its buffers: a bidirectional plan has two copies of each and refuses it."""
    return [plan for plan in PLANS if not (name == "resnet" and plan == "bidirectional")]


def is_as_whole(pool: Pool, name: str, runs: dict[str, Run], num_ranks: int, num_processes: int | None = None) -> None:
    """All ranks' differences are small, and together the ranks have compared every parameter."""
    num_blocks = BLOCKS_FOR[num_ranks]
    by_rank = pool.run(num_processes or num_ranks, differences, name, runs, num_blocks, timeout_s=220)
    every = {name for name, _ in CASES[name].make_model(num_blocks=num_blocks).named_parameters()}
    for label in runs:
        assert set().union(*(found[label][1] for found in by_rank)) == every, label
        compared = {what for found in by_rank for what in found[label][0]}
        assert compared >= {"loss", "gradients", "parameters"}, label
        if num_processes is None and label != "random":  # which has another order of forwards, see `train`
            assert compared >= {"evaluated", "outputs"}, label
        for rank, found in enumerate(by_rank):
            apart = {what: value for what, value in found[label][0].items() if not value < TOLERANCE}
            assert not apart, f"{name}, {label}, rank {rank}: {apart}"


def planned(plans: Iterable[str], num_ranks: int, seed: int = 0) -> dict[str, Run]:
    return {plan: Run(make_plan(plan, num_ranks, seed)) for plan in plans}


def turn(number: int, name: str) -> str:
    """One of a model's plans, another one for the next model."""
    plans = plans_of(name)
    return plans[number % len(plans)]


def swept_but(*core: tuple[str, str], hows: Iterable[str]) -> list[Any]:
    """Every model in each of these ways; `make test` runs the core alone."""
    return [pytest.param(*case, marks=() if case in core else pytest.mark.sweep) for case in product(CASES, hows)]


@pytest.mark.parametrize(("number", "name"), [*enumerate(CASES)])
def test_a_plan_on_two_processes(pool: Pool, number: int, name: str) -> None:
    is_as_whole(pool, name, planned([turn(number, name)], 2, seed=number), 2)


@pytest.mark.parametrize(("name", "plan"), [("t5", "zb_v"), ("mixtral", "bidirectional"), ("unet", "random")])
def test_a_plan_on_four_processes(pool: Pool, name: str, plan: str) -> None:
    is_as_whole(pool, name, planned([plan], 4), 4)


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_plan(pool: Pool, num_ranks: int, name: str) -> None:
    is_as_whole(pool, name, planned(plans_of(name), num_ranks, seed=1), num_ranks)


@pytest.mark.parametrize(("name", "how"), swept_but(("resnet", "recomputed"), hows=("recomputed", "compiled")))
def test_recomputed_and_compiled(pool: Pool, name: str, how: str) -> None:
    is_as_whole(pool, name, {plan: Run(make_plan(plan, 2), how) for plan in ("1f1b", "searched")}, 2)


@pytest.mark.parametrize(("name", "how"), swept_but(("gpt2", "plain"), ("mixtral", "plain"), hows=("plain", "fsdp")))
def test_two_replicas(pool: Pool, name: str, how: str) -> None:
    if how == "fsdp":
        pool.renew()
    is_as_whole(pool, name, {how: Run(make_plan("1f1b", 2), how)}, 2, num_processes=4)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("resnet", "t5") else pytest.mark.sweep) for name in CASES]
)
def test_resumed_on_another_plan(pool: Pool, name: str, tmp_path: Path) -> None:
    plans = make_plan("1f1b", 2), make_plan("zb_v", 2)
    for found in pool.run(2, resumed, name, *plans, tmp_path, timeout_s=120):
        assert {"loss", "gradients", "parameters"} <= found.keys()
        assert all(value < TOLERANCE for value in found.values()), found
