"""Stages of unmodified models in DDP, in FSDP2, recomputed, evaluated, and profiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rota import Cluster, Costs, Pipeline, place, split
from rota.profiling import profile_layers
from rota.schedules import one_f_one_b
from support.hf_models import CASES
from support.pool import Pool


def whole(case: Any, batch: Any, parts: int) -> tuple[float, dict[str, Any]]:
    model, total = case.make_model(), 0.0
    for m in range(parts):
        part = {name: value.chunk(parts)[m] for name, value in batch.items()}
        loss = case.loss_fn(model(**part), case.make_targets(batch).chunk(parts)[m]) / parts
        loss.backward()
        total += loss.item()
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


def recomputed(rank: int) -> list[float]:
    torch.set_num_threads(1)
    case = CASES["resnet"]
    batch = case.make_batch(8, 8, 1)
    loss, gradients = whole(case, batch, 4)
    model = case.make_model()
    stages = split(model, 2, example=case.make_batch(2, 8, 0))
    plan = one_f_one_b(place(Costs.uniform(2, 10, 20), Cluster.uniform(2)), 4)
    with Pipeline(stages, plan, case.loss_fn, recompute="full") as pipeline:
        found = [abs(pipeline.step(batch, case.make_targets(batch)) - loss)]
        found += [(p.grad - gradients[name]).abs().max().item() for name, p in pipeline.named_parameters()]
        evaluated = pipeline.evaluate(batch, case.make_targets(batch))
    assert evaluated > 0, rank
    return found


@pytest.mark.dist
def test_recomputed_and_evaluated(pool: Pool) -> None:
    for found in pool.run(2, recomputed, timeout_s=120):
        assert max(found) < 1e-10


def on_a_mesh(rank: int, how: str) -> float:
    torch.set_num_threads(1)
    case = CASES["nanogpt"]
    batches = [case.make_batch(4, 8, seed) for seed in (1, 2)]
    wholes = [whole(case, batch, 2)[1] for batch in batches]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    model = case.make_model()
    for block in model.transformer.h:
        block.dropout = 0.0
    stages = split(model, 2, example=case.make_batch(2, 8, 0))
    stage = mesh["pp"].get_local_rank()
    if how == "fsdp":
        for block in stages[stage].transformer.h.children():
            if any(True for _ in block.parameters()):
                fully_shard(block, mesh=mesh["dp"])
    plan = one_f_one_b(place(Costs.uniform(2, 10, 20), Cluster.uniform(2)), 2)
    if how == "ddp":
        modules = [*stages.modules]
        modules[stage] = DistributedDataParallel(modules[stage], process_group=mesh["dp"].get_group())
        stages = stages.with_modules(modules)
    worst = 0.0
    with Pipeline(stages, plan, case.loss_fn, mesh=mesh) as pipeline:
        batch = batches[pipeline.replica]
        pipeline.step(batch, case.make_targets(batch))
        for name, parameter in pipeline.named_parameters():
            gradient = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            expected = (wholes[0][name.removeprefix("module.")] + wholes[1][name.removeprefix("module.")]) / 2
            worst = max(worst, (gradient - expected).abs().max().item())
    assert worst < 1e-10, rank
    return worst


@pytest.mark.dist
@pytest.mark.parametrize("how", ["replicas", "ddp", "fsdp"])
def test_replicas_ddp_and_fsdp(pool: Pool, how: str) -> None:
    pool.renew()
    assert max(pool.run(4, on_a_mesh, how, timeout_s=120)) < 1e-10


@pytest.mark.parametrize("device", [None, "h100"])
def test_profile(device: str | None) -> None:
    case = CASES["gpt2"]
    model = case.make_model().float()
    if device:
        model = model.to("meta")
    batch = case.make_batch(2, 8, 0)
    if device:
        del batch["attention_mask"]  # transformers looks at its numbers
        batch = {name: value.to("meta") for name, value in batch.items()}
    targets = case.make_targets(batch)
    costs = profile_layers(model, batch, targets, case.loss_fn, repeats=1, device=device)
    assert costs.cuts == tuple(f"transformer.h.{block}" for block in range(4))
