"""What is exported to torchtitan trains as the unsplit model does, on PyTorch's runtime and by its files alone.

And the page's way into DeepSpeed gives each stage its layers.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from docs.test_other_trainers import DEEPSPEED
from rota import Cluster, Costs
from rota.compat import deepspeed as door
from rota.interop import module_parts, torchtitan
from rota.models import CutPoint, split
from rota.schedules import NAMED
from support.plain_gpt import GPT, batch_of, loss_fn, step_by_files
from support.pool import Pool

pytestmark = pytest.mark.dist

NUM_MICROBATCHES = 4


@pytest.mark.parametrize(("name", "num_ranks"), [("1f1b", 4), ("interleaved_1f1b", 2), ("zb_v", 2)])
def test_a_gpt_of_four_stages_trains_by_the_files_alone(pool: Pool, tmp_path: Path, name: str, num_ranks: int) -> None:
    family = NAMED[name]
    placement = family.place(family.adapted(Costs.uniform(4)), Cluster.uniform(num_ranks))
    model = GPT(marks={str(block): CutPoint() for block in (0, 2, 4)})
    stages = split(model, 4, example=batch_of(1)[0])
    torchtitan.export(module_parts(model, stages), family(placement, NUM_MICROBATCHES), tmp_path)

    by_rank = pool.run(num_ranks, step_by_files, str(tmp_path / "parallelism.json"), NUM_MICROBATCHES)

    whole = GPT()
    inputs, targets = batch_of(2 * NUM_MICROBATCHES)
    loss = loss_fn(whole(inputs), targets)
    loss.backward()
    losses = [loss for losses, _ in by_rank for loss in losses]
    assert len(losses) == NUM_MICROBATCHES
    assert abs(sum(losses) / NUM_MICROBATCHES - loss.item()) <= 1e-10
    theirs = {name: gradient for _, gradients in by_rank for name, gradient in gradients.items()}
    assert sum(len(gradients) for _, gradients in by_rank) == len(theirs)
    ours = dict(whole.named_parameters())
    assert theirs.keys() == ours.keys()
    for parameter, gradient in theirs.items():
        torch.testing.assert_close(gradient, ours[parameter].grad, rtol=1e-10, atol=1e-10)


def stage_by_the_page(rank: int, folder: str) -> list[Any]:
    """The page's code with Rota's door in DeepSpeed's place: this stage's layers, and a step's loss."""
    os.chdir(folder)
    space: dict[str, Any] = {"__name__": "example"}
    sys.modules.update({"deepspeed": door, "deepspeed.pipe": door})
    exec(compile(DEEPSPEED, "docs/other-trainers.md", "exec"), space)
    del sys.modules["deepspeed"], sys.modules["deepspeed.pipe"]  # patch.dict would forget what the code imports
    specs = [door.LayerSpec(nn.Linear, width, width + 1) for width in range(1, 6)]
    net = space["planned"](specs, loss_fn=nn.MSELoss())
    engine, *_ = door.initialize(model=net, config={"optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    loss = engine.train_batch(iter([(torch.ones(2, 1), torch.zeros(2, 6))]))
    os.chdir("/")
    return [[layer.in_features for layer in net.forward_funcs[0].layers], float(loss)]


def test_the_page_s_way_into_deepspeed(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "parts.json").write_text("[0, 2, 2, 5]")
    by_rank = pool.run(3, stage_by_the_page, str(tmp_path))
    assert [widths for widths, _ in by_rank] == [[1, 2], [], [3, 4, 5]]
    assert len({loss for _, loss in by_rank}) == 1
