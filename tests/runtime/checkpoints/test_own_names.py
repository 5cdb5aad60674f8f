"""Checkpoints of unmodified models have their names: they resume on other cuts, and transformers loads them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import rota
from rota import Checkpoints, Cluster, Costs, Pipeline, Stages, place
from rota.cli import main
from rota.schedules import gpipe
from support.checkpoint_runs import train
from support.hf_models import CASES
from support.pool import Pool


def batch(step: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, 61, (4, 8), generator=torch.Generator().manual_seed(step))}


def loss_fn(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def run(rank: int, kind: str, num_stages: int, folder: Path, steps: range, save: bool = False) -> list[float]:
    """On stages made without memory, of which each rank has its own; resumes first, if there is a checkpoint."""
    with rota.meta_init():
        model = CASES[kind].make_model()
    stages = rota.split(model, num_stages, example=batch(0))
    costs = Costs.uniform(num_stages)
    ranks = [stage * 2 // num_stages for stage in range(num_stages)]
    plan = gpipe(place(costs, Cluster.uniform(2), ranks, edges=[edge[:2] for edge in stages.edges]), 2)
    rota.materialize(stages, rota.local_stages(plan))
    with Pipeline(stages, plan, loss_fn) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01)
        checkpoints = Checkpoints(folder, pipeline, optimizer)
        checkpoints.load()
        losses = train(pipeline, optimizer, ((batch(step), batch(step)["input_ids"]) for step in steps))
        if save:
            checkpoints.save(steps.stop)
        return losses


def trained_whole(kind: str, num_steps: int) -> tuple[nn.Module, list[float]]:
    with rota.meta_init():
        model = CASES[kind].make_model()
    rota.materialize(Stages([model]), [0])  # the same numbers as in stages
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(num_steps):
        loss = loss_fn(model(**batch(step)), batch(step)["input_ids"])
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


@pytest.mark.parametrize("kind", ["gpt2", "llama"])  # GPT-2's head is tied, Llama's is not
def test_transformers_loads_what_is_exported_and_any_cut_resumes(kind: str, pool: Pool, tmp_path: Path) -> None:
    whole, losses = trained_whole(kind, 5)
    first = pool.run(2, run, kind, 2, tmp_path / "run", range(3), True)
    assert first[0] == pytest.approx(losses[:3], abs=1e-10)
    for num_stages in (3, 4):
        resumed = pool.run(2, run, kind, num_stages, tmp_path / "run", range(3, 5))
        assert resumed[0] == pytest.approx(losses[3:], abs=1e-10)

    whole.config.save_pretrained(tmp_path / "config")
    config, exported = tmp_path / "config" / "config.json", tmp_path / "exported"
    assert main(["checkpoint", "export", str(tmp_path / "run"), "-o", str(exported), "--config", str(config)]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float64)
    assert sorted(path.name for path in exported.iterdir()) == ["config.json", "model.safetensors"]
    expected = trained_whole(kind, 3)[0]
    for (name, tensor), (expected_name, value) in zip(
        loaded.state_dict().items(), expected.state_dict().items(), strict=True
    ):
        assert name == expected_name
        torch.testing.assert_close(tensor, value, rtol=0, atol=1e-12)

    stages = Stages([CASES[kind].make_model()])
    rota.load_pretrained(stages, [0], exported)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(stages[0].state_dict()[name], tensor), name
    logits = [model.eval()(**batch(9)).logits for model in (loaded, stages[0])]
    assert torch.equal(*logits)


def by_hand(num_stages: int) -> Stages:
    """Eight layers in sequences, whose own names for their weights clash; `names` says which layers they are."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4).double() for _ in range(8)]
    size = len(layers) // num_stages
    return Stages(
        [nn.Sequential(*layers[first : first + size]) for first in range(0, len(layers), size)],
        names=[{str(i): f"layers.{first + i}" for i in range(size)} for first in range(0, len(layers), size)],
    )


def train_by_hand(rank: int, num_stages: int, folder: Path, steps: range) -> list[float]:
    plan = gpipe(
        place(Costs.uniform(num_stages), Cluster.uniform(2), [s * 2 // num_stages for s in range(num_stages)]), 2
    )
    with Pipeline(by_hand(num_stages), plan, nn.functional.mse_loss) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01)
        checkpoints = Checkpoints(folder, pipeline, optimizer)
        checkpoints.load()
        rows = (torch.rand(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step)) for step in steps)
        losses = train(pipeline, optimizer, ((x, x) for x in rows))
        checkpoints.save(steps.stop)
        return losses


def test_stages_made_by_hand_resume_on_another_cut(pool: Pool, tmp_path: Path) -> None:
    straight = pool.run(2, train_by_hand, 2, tmp_path / "straight", range(4))[0]
    first = pool.run(2, train_by_hand, 2, tmp_path / "cut", range(2))[0]
    then = pool.run(2, train_by_hand, 4, tmp_path / "cut", range(2, 4))[0]
    assert first + then == pytest.approx(straight, abs=1e-10)
