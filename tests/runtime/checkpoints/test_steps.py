"""`Checkpoints.steps` on replicas: they become one pipeline while a rank is missing, in the middle of an epoch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rota
from rota import Checkpoints, Cluster, Costs, Pipeline, Plan, place
from rota.backups import Place, plan_backup
from rota.schedules import one_f_one_b
from support.pool import Pool

pytestmark = pytest.mark.dist

NUM_REPLICAS, NUM_ROWS, NUM_SAMPLES = 2, 8, 21  # 3 steps per epoch; replicas see a sample twice in the last one
PLAN = one_f_one_b(place(Costs.uniform(2, 100, 200), Cluster.uniform(2)), 2)
BACKUP = plan_backup(PLAN, NUM_REPLICAS, [Place(1, 0)])

Seen = list[tuple[int, float, list[int]]]  # each step, its loss, and the samples of this process


def train(rank: int, plan: Plan, folder: Path, loads: str, last: int = 6) -> Seen:
    """All steps of two epochs before step `last`, from where the folder's newest checkpoint is."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.1)) for _ in range(2))).double()
    x = torch.randn(NUM_SAMPLES, 4, dtype=torch.float64)
    dataset = TensorDataset(x, torch.arange(NUM_SAMPLES))
    mesh = rota.mesh(pp=plan.num_ranks, dp=torch.distributed.get_world_size() // plan.num_ranks)
    found: Seen = []
    with Pipeline(rota.split(model, 2), plan, nn.functional.mse_loss, mesh=mesh) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01)
        mine = slice(pipeline.replica, None, pipeline.num_replicas)
        if loads == "own rows":
            sampler = pipeline.sampler(dataset)
            loader, mine = DataLoader(dataset, NUM_ROWS // pipeline.num_replicas, sampler=sampler), slice(None)
        else:
            loader = DataLoader(dataset, NUM_ROWS, shuffle=True)
        checkpoints = Checkpoints(folder, pipeline, optimizer)
        for step, (rows, numbers) in checkpoints.steps(loader, num_epochs=2, save_every=1):
            if step == last:
                break
            found.append((step, pipeline.step(rows[mine], rows.flip(1)[mine]), numbers[mine].tolist()))
            optimizer.step()
            optimizer.zero_grad()
    return found


def of_all(found: list[Seen]) -> Seen:
    """With the samples of all replicas, whose first processes are every `PLAN.num_ranks`-th one."""
    each = zip(*found[:: PLAN.num_ranks], strict=True)
    return [
        (step, loss, sorted(n for *_, numbers in same for n in numbers)) for same in each for step, loss, _ in same[:1]
    ]


@pytest.mark.parametrize("loads", ["own rows", "all rows"])
def test_an_epoch_goes_on_without_a_rank_and_with_it_again(pool: Pool, tmp_path: Path, loads: str) -> None:
    """Lost in the first epoch, back in the second, which was begun without it."""
    everyone, left = NUM_REPLICAS * PLAN.num_ranks, BACKUP.num_ranks
    expected = of_all(pool.run(everyone, train, PLAN, tmp_path / "undisturbed", loads))
    found = of_all(pool.run(everyone, train, PLAN, tmp_path / "disturbed", loads, 2))
    found += of_all(pool.run(left, train, BACKUP, tmp_path / "disturbed", loads, 4)[:1])
    found += of_all(pool.run(everyone, train, PLAN, tmp_path / "disturbed", loads))
    assert [(step, numbers) for step, _, numbers in found] == [(step, numbers) for step, _, numbers in expected]
    assert [loss for _, loss, _ in found] == pytest.approx([loss for _, loss, _ in expected], abs=1e-12, rel=0)
    for epoch in (found[:3], found[3:]):
        assert {number for *_, numbers in epoch for number in numbers} == {*range(NUM_SAMPLES)}
