"""Checkpoints that cannot be saved, or do not fit: refused on all ranks, and nothing changes."""

from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from rota import Checkpoints, Pipeline, split
from rota.runtime.checkpoints.checkpoint_folder import LOCK
from support.checkpoint_runs import TWO, Training, model, save_model
from support.networks import loss_fn, refusal
from support.pool import Pool


def refused_saves(rank: int, folder: Path) -> list[str]:
    training = Training(TWO)
    with training.pipeline as pipeline:
        training.steps(range(1))
        checkpoints = training.checkpoints(folder)
        alien = nn.Linear(2, 3)
        with_alien = Checkpoints(folder, pipeline, torch.optim.SGD([*pipeline.parameters(), *alien.parameters()]))
        messages = [
            refusal(lambda: checkpoints.save(-1)),
            refusal(lambda: checkpoints.save(1, seen={3, 4})),
            refusal(lambda: checkpoints.save(1, seed=1 << 50_000)),
            refusal(lambda: checkpoints.save(1, rank=rank)),
            refusal(lambda: with_alien.save(1)),
            refusal(lambda: Checkpoints(folder, pipeline, None, keep=0)),
            refusal(lambda: Checkpoints(folder, pipeline, None, keep="3")),  # type: ignore[arg-type]
            refusal(lambda: Checkpoints(None, pipeline, None)),  # type: ignore[arg-type]
            refusal(lambda: Checkpoints(folder, pipeline, [training.optimizer])),  # type: ignore[arg-type]
            refusal(lambda: Checkpoints(folder, pipeline, training.optimizer if rank else None, training.scheduler)),
        ]
        if rank == 1:
            training.scheduler.last_epoch += 1
        messages.append(refusal(lambda: checkpoints.save(1)))
        if rank == 1:
            training.scheduler.last_epoch -= 1
            training.optimizer.param_groups[0]["lr"] = 0.5
        messages.append(refusal(lambda: checkpoints.save(1)))
        return messages


def test_what_cannot_be_saved_is_refused_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    on_rank_0, on_rank_1 = pool.run(2, refused_saves, tmp_path)
    assert on_rank_0 == on_rank_1
    for messages, words in zip(
        on_rank_0,
        [
            "step=-1; give a whole number from 0 to",
            "extra['seen'] is a set, \"{3, 4}\", but checkpoints hold only numbers",
            "extra['seed'] is a int of 50,001 bits, but checkpoints hold only numbers",
            'process 1 has saved step 1 with {"rank": 1}, but process 0 step 1 with {"rank": 0}; save the same on all',
            "the optimizer's group 0 has a parameter of shape [3, 2] that is in none of this rank's stages",
            "keep=0: keep 1 checkpoint or more, or all by keep=None",
            "keep='3': keep 1 checkpoint or more, or all by keep=None",
            "folder=None: give the path of a folder, which all ranks see",
            "the optimizer is a list; give one torch.optim.Optimizer or None",
            "process 0: a LambdaLR, but no optimizer; give both, or None for both",
            "process 1's scheduler is in another state",
            "process 1 has lr = 0.5 for 0.linear.weight, and another has 0.018",  # the tied one
        ],
        strict=True,
    ):
        assert words in messages
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, "step-1.partial"]


def refused_loads(rank: int, folder: Path) -> list[str]:
    training = Training(TWO)
    messages = []
    with training.pipeline as pipeline:
        training.steps(range(1))
        before = [p.detach().clone() for p in pipeline.parameters()]
        sgd = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        one_group = torch.optim.AdamW(pipeline.parameters(), lr=0.1)
        few = torch.optim.AdamW([*pipeline.parameters()][:1], lr=0.1)
        for optimizer, scheduler in (
            (sgd, None),
            (one_group, None),
            (few, None),
            (training.optimizer, None),
            (training.optimizer, StepLR(training.optimizer, 1)),
        ):
            messages.append(refusal(Checkpoints(folder, pipeline, optimizer, scheduler).load))
        assert all(map(torch.equal, before, pipeline.parameters()))
    longer, shorter, short_bias = [*model(), nn.Linear(6, 6)], model()[:-1], model()
    short_bias[1].linear.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    for layers in (longer, shorter, short_bias, model().float()):
        with Pipeline(split(nn.Sequential(*layers), 2), TWO.plan(), loss_fn) as pipeline:
            messages.append(refusal(Checkpoints(folder, pipeline, None).load))
    return messages


def test_what_does_not_fit_is_refused_on_all_ranks_and_changes_nothing(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_model, tmp_path)
    on_rank_0, on_rank_1 = pool.run(2, refused_loads, tmp_path)
    assert on_rank_0 == on_rank_1
    for messages, words in zip(
        on_rank_0,
        [
            "saved with AdamW, but this is SGD",
            "0.linear.weight and 0.linear.bias are in one group, 0, but were saved with different lr",
            "was in the optimizer when it was saved, but is not in this one; add it",
            "saved with LambdaLR, but this rank's optimizer has no scheduler; give Checkpoints the same kind",
            "saved with LambdaLR, but this rank's optimizer has StepLR; give Checkpoints the same kind",
            "this is another model: the checkpoint lacks 8.weight, 8.bias; build the one that was saved",
            "this is another model: the checkpoint also has 7.linear.bias, 7.scale; build the one that was saved",
            "1.linear.bias was saved as [6] of torch.float64, but is [1] of torch.float64; make both equal",
            "was saved as [6, 6] of torch.float64, but is [6, 6] of torch.float32; make both equal",
        ],
        strict=True,
    ):
        assert words in messages
