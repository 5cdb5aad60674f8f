"""The deepspeed and torchdistpackage doors with replicas and parts, whose gradients are averaged once a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compat.test_deepspeed_training import pairs
from compat.test_torchdistpackage import batch, groups, layers
from rota.compat.deepspeed import PipelineModule
from rota.compat.torchdistpackage import DDP, clip_grad_norm_, forward_backward, forward_eval, partition_uniform, tpc
from support.pool import Pool

pytestmark = pytest.mark.dist


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()


def deepspeed(rank: int) -> tuple[float, dict[str, tuple[Tensor, Tensor | None]]]:
    """Two pipelines of two stages; every process begins with other weights."""
    torch.manual_seed(rank)
    module = PipelineModule(network(), num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
    module.micro_batches = 2
    replica = module.mpu().data_parallel_id
    loss = module.train_batch(iter(pairs()[2 * replica : 2 * replica + 2])).item()
    module.close()
    return loss, {name: (p.detach(), p.grad) for name, p in module.named_parameters()}


def test_replicas_of_a_pipeline_module(pool: Pool) -> None:
    by_rank = pool.run(4, deepspeed)
    serial = network()
    serial.load_state_dict({name: p for _, found in by_rank for name, (p, _) in found.items()})
    losses = [nn.MSELoss()(serial(x), y) for x, y in pairs()]
    (sum(losses) / 4).backward()
    for loss, found in by_rank:
        assert loss == pytest.approx(sum(losses).item() / 4, abs=1e-12)
        for name, (_, gradient) in found.items():
            torch.testing.assert_close(gradient, serial.get_parameter(name).grad, rtol=1e-10, atol=1e-10)


def torchdistpackage(rank: int, num_replicas: int, num_parts: int) -> tuple[int, list[Any], float]:
    with groups(data=num_replicas, pipe=2, tensor=num_parts):
        model = DDP(nn.Sequential(*partition_uniform(layers())))
        x, y = (value.chunk(num_replicas)[tpc.get_dp_rank()] for value in batch())

        def forward(inputs: Any) -> Tensor:
            if tpc.is_first_in_pipeline_group():
                return model(inputs)
            return nn.functional.mse_loss(model(inputs[0]), inputs[1])

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = [x] if tpc.is_first_in_pipeline_group() else [y]
        for _ in range(2):  # the second clears what the first has averaged
            forward_backward(optimizer, forward, None, inputs, 2, scatter_gather_tensors=num_parts > 1)
        norm = clip_grad_norm_(model.parameters(), 1e9).item()
        forward_eval(model, x if tpc.is_first_in_pipeline_group() else None)
        return tpc.get_pp_rank(), [p.grad for p in model.parameters()], norm


@pytest.mark.parametrize(("num_replicas", "num_parts"), [(2, 1), (1, 2)])
def test_replicas_and_parts_of_forward_backward(pool: Pool, num_replicas: int, num_parts: int) -> None:
    serial = nn.Sequential(*layers())
    for x, y in zip(*(value.chunk(2 * num_replicas) for value in batch()), strict=True):
        (nn.functional.mse_loss(serial(x), y) / num_replicas).backward()
    whole = [p.grad for p in serial.parameters()]
    norm = nn.utils.get_total_norm(whole).item()
    for stage, gradients, its_norm in pool.run(4, torchdistpackage, num_replicas, num_parts):
        expected = whole[-len(gradients) :] if stage else whole[: len(gradients)]
        for gradient, wanted in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-12)
        assert its_norm == pytest.approx(norm, rel=1e-9)
