"""PyTorch's engine runs every chain plan, with the losses and gradients of Rota's engine and the unsplit model."""

from __future__ import annotations

import io
import os
import random
import re
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from cli.test_run import refused, rota, write_plan
from rota import Cluster, Costs, Kind, Pipeline, Plan, Stages, add_loss, place
from rota.interop import TorchEngine
from rota.runtime.environment import PROGRESS
from rota.schedules import NAMED
from support.commands import output_of
from support.core_strategies import deal, linear_extension
from support.engine_runs import assert_right, run_made, steps, two_layers
from support.fresh import run_fresh
from support.networks import WIDTH, Layer, StepResult, assert_equal_steps, batch_of, chain, loss_fn, serial_step
from support.plain_torch import plain_steps
from support.pool import Pool
from support.sampling import some
from support.watch_clock import WatchClock, once_all_are

pytestmark = pytest.mark.dist

NUM_PLANS = some(60)


def random_chain(seed: int, num_ranks: int, split_chance: float = 0.0) -> Plan:
    """A chain with stages anywhere and micro-batches in any order; some with I and W instead of B."""
    rng = random.Random(seed)
    num_stages = rng.randint(1, 6)

    def times() -> tuple[int, ...]:
        return tuple(rng.randint(0, 3) for _ in range(num_stages))

    costs = Costs(times(), times(), times() if rng.random() < split_chance else None)
    cluster = Cluster.uniform(num_ranks, latency_us=rng.choice([0, 0, 1, 5]))
    placement = place(costs, cluster, [rng.randrange(num_ranks) for _ in range(num_stages)])
    if rng.random() < 0.1:
        placement = placement.forward_only()
    num_microbatches = rng.randint(1, 6)
    sequence = linear_extension(placement, num_microbatches, rng, in_order=rng.random() < 0.3)
    return deal(placement, num_microbatches, sequence)


def run_cases(rank: int, cases: list[tuple[Plan, list[Any]]], engines: list[Any]) -> list[list[list[StepResult]]]:
    return [
        [steps(engine, rank, chain(plan.num_stages), plan, batches) for engine in engines] for plan, batches in cases
    ]


def assert_cases(pool: Pool, num_ranks: int, plans: list[Plan], engines: list[Any]) -> None:
    cases = [(plan, [batch_of(plan.num_microbatches, seed) for seed in (1, 2)]) for plan in plans]
    by_rank = pool.run(num_ranks, run_cases, cases, engines)
    for case, (plan, batches) in enumerate(cases):
        for step, batch in enumerate(batches):
            serial = serial_step(chain(plan.num_stages), *batch)
            if all(task.kind is Kind.F for task in plan.placement.tasks):
                serial.gradients.clear()
            for engine in range(len(engines)):
                assert_equal_steps([results[case][engine][step] for results in by_rank], serial)


@pytest.mark.parametrize("first", [0, pytest.param(9, marks=pytest.mark.sweep)])
def test_random_chains_on_both_engines(pool: Pool, first: int) -> None:
    for num_ranks in (2, 3, 4):
        plans = [random_chain(seed, num_ranks) for seed in range(first + num_ranks, 3 * NUM_PLANS, 18)]
        assert_cases(pool, num_ranks, plans, [TorchEngine, Pipeline])


def test_random_chains_of_split_backwards(pool: Pool) -> None:
    assert_cases(pool, 3, [random_chain(seed, 3, split_chance=1) for seed in range(some(20))], [TorchEngine, Pipeline])


# --- what travels -----------------------------------------------------------------------------------------------------


class Source(nn.Module):
    """Sends all that may travel: tensors, integers, a number, None; in a dict and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer().double()

    def forward(self, x: Tensor) -> Any:
        return {"x": self.layer(x), "signs": (x > 0).long(), "rest": (x.detach(), None, 3)}


class Reader(nn.Module):
    """Reads all of it, and the batch as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.embedding = Layer().double(), nn.Embedding(2, 1).double()

    def forward(self, value: Any, x: Tensor) -> Tensor:
        kept, nothing, number = value["rest"]
        assert nothing is None
        result: Tensor = self.layer(value["x"], kept, x) * number + self.embedding(value["signs"]).squeeze(-1)
        return result


def source_and_reader() -> Stages:
    torch.manual_seed(0)
    return Stages([Source(), nn.Identity(), Reader()], inputs={0: 0, 2: 0})


@pytest.mark.parametrize("split", [False, True])
def test_values_of_every_kind(pool: Pool, split: bool) -> None:
    costs = Costs.uniform(3, weight_us=1 if split else None)
    for ranks in ([0, 1, 2], [0, 0, 1], [1, 0, 1]):
        plan = NAMED["gpipe"](place(costs, Cluster.uniform(max(ranks) + 1), ranks), 3)
        assert_right(pool, source_and_reader, plan)


def test_shapes_that_change_between_steps(pool: Pool) -> None:
    x, target = batch_of(4)
    batches = [(x, target), (x[:8], target[:8]), (x, target)]
    plan = NAMED["1f1b"](place(Costs.uniform(2), Cluster.uniform(2)), 4)
    by_rank = pool.run(2, run_made, two_layers, plan, batches)
    for step, batch in enumerate(batches):
        assert_equal_steps([results[step] for results in by_rank], serial_step(chain(2), *batch))


class Grows(nn.Module):
    """A layer's output once or twice, as the data says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer().double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layer(x)] * (1 + int(x[0, 0] > 0)))


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] > 0:
            raise KeyError("no words")
        return x * 1


class Adds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        add_loss(x.mean())
        return x * 1


def step_with(rank: int, first: nn.Module, positive: int) -> None:
    """A step in which the rows of a batch are negative at first, then positive."""
    plan = NAMED["gpipe"](place(Costs.uniform(2), Cluster.uniform(2)), 2)
    x = torch.full((4, WIDTH), -1.0, dtype=torch.float64)
    x[positive:] *= -1
    with TorchEngine(Stages([first, Layer().double()]), plan, loss_fn) as engine:
        engine.step(x, x)


@pytest.mark.parametrize(
    ("first", "positive", "told"),
    [
        (Fails(), 0, "KeyError: 'no words'"),
        (Fails(), 2, "KeyError: 'no words'"),
        (
            Grows(),
            2,
            "rota.errors.PipelineError: stage 0 made float64[4, 6] with gradient for micro-batch 1, but float64[2, 6] "
            "with gradient for micro-batch 0, and PyTorch's engine receives into buffers made beforehand; give it "
            "micro-batches of one shape, or run the plan by Rota's engine",
        ),
        (
            Adds(),
            0,
            "rota.errors.PipelineError: stage 0 calls rota.add_loss, which PyTorch's engine does not support; run the "
            "plan on Rota's engine",
        ),
    ],
)
def test_what_a_stage_raises_is_told_as_it_is(tmp_path: Path, first: nn.Module, positive: int, told: str) -> None:
    ended = run_fresh(tmp_path, 2, step_with, first, positive)
    assert [each.exit_code for each in ended] == [1, 1]
    assert ended[0].last_line == told
    assert ended[1].last_line.startswith("rota.errors.LostRankError: lost a rank")


def step_with_a_count(rank: int) -> None:
    plan = NAMED["gpipe"](place(Costs.uniform(2), Cluster.uniform(2)), 2)
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    with TorchEngine(two_layers(), plan, lambda output, _: (output.sum(), len(output))) as engine:
        engine.step(x, x)


def told_by_ten_steps(rank: int) -> str:
    plan = NAMED["1f1b"](place(Costs.uniform(2), Cluster.uniform(2)), 4)
    told = io.StringIO()
    with patch.dict(os.environ, {PROGRESS: "1"}), redirect_stderr(told):
        steps(TorchEngine, rank, two_layers(), plan, [batch_of(4)] * 10)
    return told.getvalue()


def test_the_first_rank_shows_progress(pool: Pool) -> None:
    first, second = pool.run(2, told_by_ten_steps)
    assert re.fullmatch(r"rota run: 10 steps, median .* each \(the plan has no measured costs\)\n", first)
    assert second == ""


def test_a_loss_with_a_count_is_refused(tmp_path: Path) -> None:
    ended = run_fresh(tmp_path, 2, step_with_a_count)
    assert "loss_fn returned a count or metrics, but PyTorch's engine takes a mean loss alone" in ended[1].last_line


class Sleeps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] > 0:
            time.sleep(100)
        return x * 1


def step_with_a_watchdog(rank: int, folder: Path) -> None:
    WatchClock(once_all_are(folder, rank, {0: "start of 0F[01] .*in forward", 1: "start of 1F0"}))
    plan = NAMED["gpipe"](place(Costs.uniform(2), Cluster.uniform(2)), 2)
    x = torch.tensor([[-1.0], [1.0]], dtype=torch.float64).expand(2, WIDTH)
    with TorchEngine(Stages([Sleeps(), Layer().double()]), plan, loss_fn, timeout_s=60) as engine:
        engine.step(x, x)


def test_a_rank_that_is_stuck_is_ended(tmp_path: Path) -> None:
    ended = run_fresh(tmp_path, 2, step_with_a_watchdog, tmp_path)
    assert 70 in [each.exit_code for each in ended]
    told = "\n".join(each.stderr for each in ended)
    assert "so all ranks end: rank 0 makes no progress" in told
    assert re.search(r"rank 0 is in PyTorch's engine, after the start of 0F[01] \(test_torch_engine.py:\d+ in", told)
    assert re.search(r"rank 1 is in PyTorch's engine, after the start of 1F0 for [\d.]+ s, in step 1", told)


# --- plans in PyTorch's hands -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("communication", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_v"])
def test_pytorch_runs_a_csv_without_rota(pool: Pool, name: str, communication: bool) -> None:
    family = NAMED[name]
    num_stages = 2 * family.stages_per_rank
    plan = family(family.place(family.adapted(Costs.uniform(num_stages)), Cluster.uniform(2)), 4)
    ranks = [plan.placement.ranks_of(stage)[0] for stage in range(num_stages)]
    csv = plan.to_csv(communication=communication)
    batch = batch_of(4)
    by_rank = pool.run(2, plain_steps, csv, [*chain(num_stages).modules], ranks, 4, [batch])
    serial = serial_step(chain(num_stages), *batch)
    theirs = {name: gradient for results in by_rank for name, gradient in results[0][0].items()}
    assert theirs.keys() == {f"{stage}.{name}" for stage, name in serial.gradients}
    for (stage, parameter), gradient in serial.gradients.items():
        torch.testing.assert_close(theirs[f"{stage}.{parameter}"], gradient, rtol=1e-10, atol=1e-10)


SCRIPT = """
import sys, torch, rota
from torch import nn
plan = rota.given_plan()
torch.manual_seed(0)
stages = rota.split(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), plan.num_stages)
with rota.Pipeline(stages, plan, nn.functional.mse_loss) as pipeline:
    loss = pipeline.step(torch.ones({rows}, 2), torch.zeros({rows}, 2))
    sys.stdout.write(f"{{type(pipeline).__name__}} {{loss:.6f}}\\n")
"""


def test_a_script_runs_on_either_engine(pool: Pool, tmp_path: Path) -> None:
    write_plan(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT.format(rows=8))
    on_torch = rota(tmp_path, "run", "--engine", "torch", "plan.json", "train.py")
    assert on_torch.returncode == 0, on_torch.stderr
    assert on_torch.stdout.startswith("TorchEngine")
    on_rota = output_of(pool, tmp_path, "rota run plan.json train.py")
    assert sorted(on_torch.stdout.replace("TorchEngine", "Pipeline").splitlines()) == sorted(on_rota.splitlines())


@pytest.mark.sweep
def test_a_run_refuses_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(rows=10))
    write_plan(tmp_path)
    done = rota(tmp_path, "run", "--engine", "torch", "plan.json", "train.py")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "micro-batch 2 has inputs of the shapes [[2, 2]], micro-batch 0 of [[3, 2]]" in done.stderr


def test_the_command_line_refuses_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_plan(tmp_path)
    on_torch = "--engine", "torch"
    code, error = refused(tmp_path, monkeypatch, capfd, *on_torch, "--timeline", "t.json", "plan.json", "train.py")
    assert (code, "PyTorch's engine records none; use --engine rota" in error) == (2, True)
    placement = place(Costs.uniform(3, edges=[(0, 2), (1, 2)]), Cluster.uniform(3))
    (tmp_path / "dag.json").write_text(NAMED["gpipe"](placement, 2).to_json())
    code, error = refused(tmp_path, monkeypatch, capfd, *on_torch, "dag.json", "train.py")
    assert (code, "or use --engine rota" in error) == (2, True)
