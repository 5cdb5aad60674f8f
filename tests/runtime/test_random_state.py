"""Dropout depends on step, stage and micro-batch alone, and all ranks' random states stay in step."""

import ast
import re
from pathlib import Path

import torch
from torch import nn

import rota
from rota import Cluster, Costs, Pipeline, Plan, Stages, place
from rota.runtime.compute import seed_of
from rota.schedules import NAMED
from support.networks import batch_of, loss_fn
from support.pool import Pool


def losses_and_next_numbers(rank: int, plan: Plan) -> tuple[list[float], list[float]]:
    """Two steps with dropout on the first stage only, and what each rank draws after each."""
    torch.manual_seed(5)
    stages = Stages([nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).double(), nn.Linear(6, 6).double()])
    losses, numbers = [], []
    with Pipeline(stages, plan, loss_fn) as pipeline:
        for _ in range(2):
            losses.append(pipeline.step(*batch_of(4)))
            numbers.append(float(torch.rand(())))
    return losses, numbers


def test_dropout(pool: Pool) -> None:
    placement = place(Costs.uniform(2), Cluster.uniform(2))
    swapped = NAMED["gpipe"](placement, 4)
    order = [tuple(sorted(o, key=lambda op: (op.kind == "B", -op.microbatch))) for o in swapped.orders]
    plans = [NAMED["1f1b"](placement, 4), swapped, Plan(placement, 4, tuple(order))]
    results = [pool.run(2, losses_and_next_numbers, plan) for plan in plans]
    for (losses, numbers), (other_losses, other_numbers) in results:
        assert losses == other_losses
        assert numbers == other_numbers
        assert losses[0] != losses[1]
        assert numbers[0] != numbers[1]
        torch.testing.assert_close(losses, results[0][0][0])


def test_what_an_op_draws_is_the_same_in_each_process_and_in_each_version_of_python() -> None:
    assert seed_of(0, 0, 0) == 3882903725285577553
    assert seed_of(2**62 - 1, 3, 17) == 4848491782564431751
    seeds = {seed_of(seed, stage, m) for seed in range(8) for stage in range(8) for m in range(8)}
    assert len(seeds) == 8**3
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_nothing_depends_on_pythons_own_hashes() -> None:
    """They differ between processes, or versions of Python, and so would what a restart repeats."""
    used = []
    for path in sorted(Path(rota.__file__).parent.rglob("*.py")):
        text = path.read_text()
        hashers = {"__hash__", "_hashable"}  # of dictionaries, within a process; and where only that it has one counts
        for function in ast.walk(ast.parse(text)) if re.search(r"\bhash\(", text) else ():
            if isinstance(function, ast.FunctionDef) and function.name not in hashers:
                calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
                used += [
                    f"{path}: {function.name}" for func in calls if isinstance(func, ast.Name) and func.id == "hash"
                ]
    assert not used
