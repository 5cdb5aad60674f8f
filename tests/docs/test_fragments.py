"""The pieces of code in docs/running.md and docs/mesh.md run, each where the text around it puts it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import rota
from rota import Cluster, Costs, place
from rota.runtime.launcher_files import write_plan
from rota.schedules import one_f_one_b
from support.pages import python_blocks
from support.pool import Pool


class Head(nn.Linear):
    def forward(self, text: Tensor, image: Tensor) -> Tensor:
        return super().forward(torch.cat([text, image], dim=1))


class VocabularyParallelEmbedding(nn.Module):
    """Of 8 rows, those of this rank."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group, self.first = group, 4 * (group.rank() if group else 0)
        self.weight = nn.Parameter(torch.arange(8.0).repeat(3, 1).T[self.first : self.first + 4].clone())

    def forward(self, tokens: Tensor) -> Tensor:
        own = tokens - self.first
        is_here = (own >= 0) & (own < 4)
        return rota.spmd.sum_over_ranks(
            nn.functional.embedding(own * is_here, self.weight) * is_here[..., None], self.group
        )


def equal_layers(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(count))).double()


def run_running(rank: int, code: list[str], folder: str, monkeypatched: dict[str, str]) -> dict[str, Any]:
    begin, step, device, marked, towers, several, evaluation = code
    inputs, targets = torch.randn(2, 4, 3, dtype=torch.float64)
    space: dict[str, Any] = {"rota": rota, "model": equal_layers(2), "loss_fn": nn.functional.mse_loss}
    space |= {"inputs": inputs, "targets": targets}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in monkeypatched.items():
            patch.setenv(name, value)
        exec(begin, space)
        exec(step, space)
        space["model"] = equal_layers(2)
        exec(device, space)
        assert space["stages"][rank].get_parameter("0.0.weight" if rank == 0 else "1.0.weight").device.type == "cpu"
        exec(evaluation, space)
    expected = nn.functional.mse_loss(equal_layers(2)(inputs), targets).item()
    space["pipeline"].close()
    found = {"loss": space["loss"] - expected, "asked": space["outputs"] is not None}

    marked_space: dict[str, Any] = {"rota": rota, "torch": torch, "nn": nn}
    exec(marked, marked_space)
    found["cuts"] = marked_space["stages"].cuts

    towers_space = {"rota": rota, "text_tower": nn.Linear(2, 3), "image_tower": nn.Linear(4, 3), "head": Head(6, 1)}
    exec(towers, towers_space)
    stages, batch = towers_space["stages"], {"tokens": torch.randn(5, 2), "pixels": torch.randn(5, 4)}
    found["towers"] = [*stages.run(batch).shape]

    placement = place(Costs.uniform(3), Cluster.uniform(2), [range(2), 0, 1])
    space = {"rota": rota, "plan": one_f_one_b(place(Costs.uniform(1), Cluster.uniform(2), [range(2)]), 2)}
    space |= {"VocabularyParallelEmbedding": VocabularyParallelEmbedding, "blocks": [nn.Linear(3, 3), nn.Linear(3, 1)]}
    space["plan"] = rota.schedules.gpipe(placement, 2)
    exec(several, space)
    tokens, target = torch.tensor([[1], [6]]), torch.zeros(2, 1, 1)
    with rota.Pipeline(space["stages"], space["plan"], nn.functional.mse_loss) as pipeline:
        pipeline.step(tokens, target)
        found["rows"] = pipeline.local_stages[0].weight.grad.abs().sum(1).nonzero().flatten().tolist()
    return found


def test_running(pool: Pool, tmp_path: Path) -> None:
    plan = one_f_one_b(place(Costs.uniform(2), Cluster.uniform(2)), 2)
    environment = write_plan(plan, str(tmp_path))
    first, second = pool.run(2, run_running, python_blocks("running.md"), str(tmp_path), environment)
    for found in first, second:
        assert abs(found["loss"]) < 1e-10
        assert (found["cuts"], found["towers"]) == (("cut",), [5, 1])
    assert (first["asked"], second["asked"]) == (True, False)
    assert (first["rows"], second["rows"]) == ([1], [2])  # of tokens 1 and 6 on ranks with four rows each


def gradients_when_sharded(rank: int, code: str, modules: dict[str, Any]) -> dict[str, Tensor]:
    plan, mesh = one_f_one_b(place(Costs.uniform(2), Cluster.uniform(2)), 2), rota.mesh(pp=2, dp=2)
    stages = rota.split(copy.deepcopy(equal_layers(2)), 2)
    for module in stages.modules:
        module.layers = [*module.children()]  # as the page's own stages have them
    space = {"rota": rota, "plan": plan, "mesh": mesh, "stages": stages, "s": mesh.get_local_rank("pp"), **modules}
    exec(code, space)
    torch.manual_seed(1)
    x, y = torch.randn(2, 4, 3, dtype=torch.float64)
    mine = slice(2 * mesh.get_local_rank("dp"), 2 * mesh.get_local_rank("dp") + 2)
    with rota.Pipeline(space["stages"], plan, nn.functional.mse_loss, mesh=mesh) as pipeline:
        pipeline.step(x[mine], y[mine])
        grads = {name: p.grad for name, p in pipeline.named_parameters()}
        whole = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()}
    dist.barrier()
    return {f"{mesh.get_local_rank('pp')}.{name.split('.')[-1]}": g.clone() for name, g in whole.items()}


def test_sharded_stages(pool: Pool) -> None:
    model = equal_layers(2)
    torch.manual_seed(1)
    x, y = torch.randn(2, 4, 3, dtype=torch.float64)
    nn.functional.mse_loss(model(x), y).backward()
    pool.renew()
    for found in pool.run(4, gradients_when_sharded, python_blocks("mesh.md")[1], {"fully_shard": fully_shard}):
        for name, gradient in found.items():
            stage, kind = name.split(".")
            torch.testing.assert_close(gradient, getattr(model[int(stage)][0], kind).grad, rtol=1e-10, atol=1e-10)
