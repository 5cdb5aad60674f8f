"""What fits into a checkpoint and out of it again: groups, parts, ranks without weights; and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR, SequentialLR, StepLR

import rota
from rota import Checkpoints, Cluster, Costs, Pipeline, Plan, Stages, place, split, spmd
from rota.cli import main
from rota.runtime.checkpoints.checkpoint_folder import LOCK
from rota.runtime.checkpoints.weights import names_of
from rota.schedules import gpipe, one_f_one_b
from support.checkpoint_runs import TWO, Run, Training, batch, model, save_model, serial_losses, stored, train
from support.networks import batch_of, chain, loss_fn, refusal
from support.parallel_modules import GatheredLayer, ParallelLayer
from support.pool import Pool


def plan_on(ranks: list[Any], num_ranks: int = 2) -> Plan:
    return one_f_one_b(place(Costs.uniform(len(ranks)), Cluster.uniform(num_ranks), ranks), 4)


def grouped(named: Any) -> tuple[torch.optim.Optimizer, Any]:
    """The first layers' weights in a group of their own, which is empty on other ranks; a schedule of schedules."""
    groups: list[dict[str, Any]] = [{"params": [], "lr": 0.3, "momentum": 0.5}, {"params": [], "lr": 0.02}]
    for name, parameter in named:
        groups[name.split(".")[0] not in "01"]["params"].append(parameter)
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    first = LambdaLR(optimizer, [lambda n: 0.5**n, lambda n: 0.9**n])
    return optimizer, SequentialLR(optimizer, [first, StepLR(optimizer, 2, 0.5)], [2])


def grouped_training(num_ranks: int) -> Training:
    """Of an untied model, so that each layer is in one group."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(6))).double()
    return Training(Run("1f1b", num_ranks), split(layers, num_ranks), grouped)


def save_grouped(rank: int, num_ranks: int, folder: Path) -> list[float]:
    with grouped_training(num_ranks) as training:
        training.steps(range(3))
        training.checkpoints(folder).save(3)
        return training.steps(range(3, 8))


def load_grouped(rank: int, num_ranks: int, folder: Path) -> tuple[list[float], list[float]]:
    with grouped_training(num_ranks) as training:
        training.checkpoints(folder).load()
        last = training.scheduler.get_last_lr()
        losses = training.steps(range(3, 8))
        return losses, [lr for lr, group in zip(last, training.optimizer.param_groups, strict=True) if group["params"]]


@pytest.mark.parametrize(("saving", "loading"), [(3, 1), (1, 3), (2, 3)])
def test_groups_and_their_schedules_find_their_weights(pool: Pool, tmp_path: Path, saving: int, loading: int) -> None:
    (expected, *_) = pool.run(saving, save_grouped, saving, tmp_path)
    lrs = set()
    for losses, last in pool.run(loading, load_grouped, loading, tmp_path):
        assert losses == pytest.approx(expected, abs=1e-10)
        lrs |= {*last}
    assert lrs == {0.3, 0.02}  # StepLR began anew at its milestone


def without_weights(rank: int, folder: Path) -> list[float]:
    """Rank 1 has a stage of activations alone, and neither optimizer nor scheduler."""
    torch.manual_seed(0)
    stages = Stages([nn.Linear(6, 6).double(), nn.Tanh(), nn.Linear(6, 6).double()])
    with Pipeline(stages, plan_on([0, 1, 2], 3), loss_fn) as pipeline:
        optimizer = scheduler = None
        if parameters := [*pipeline.parameters()]:
            optimizer = torch.optim.Adam(parameters, lr=0.1)
            scheduler = StepLR(optimizer, 1, 0.5)
        checkpoints = Checkpoints(folder, pipeline, optimizer, scheduler)
        train(pipeline, optimizer, map(batch, range(2)), scheduler)
        checkpoints.save(2)
        losses = train(pipeline, optimizer, map(batch, range(2, 4)), scheduler)
        checkpoints.load()
        assert train(pipeline, optimizer, map(batch, range(2, 4)), scheduler) == losses
        return losses


def test_a_rank_without_weights_takes_part(pool: Pool, tmp_path: Path) -> None:
    first, *others = pool.run(3, without_weights, tmp_path)
    assert others == [first] * 2


def evaluate_loaded(rank: int, folder: Path) -> float:
    training = Training(Run("v", 1))
    with training.pipeline as pipeline:
        Checkpoints(folder, pipeline, None).load()
        assert not training.optimizer.state
        return pipeline.evaluate(*batch(2))


def test_the_model_alone_is_loaded_without_an_optimizer(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_model, tmp_path)
    assert pool.run(1, evaluate_loaded, tmp_path) == [pytest.approx(serial_losses(3)[2], abs=1e-10)]


def test_wrappers_leave_no_trace_in_names() -> None:
    layers = chain(2)
    stages = Stages(
        [
            torch.compile(layers[0], backend="eager"),
            nn.Sequential(checkpoint_wrapper(torch.compile(layers[1], backend="eager"))),
        ]
    )
    names = [name for names in names_of(stages).values() for name in names]
    assert names == ["linear.weight", "linear.bias", "0.linear.weight", "0.linear.bias"]


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> Any:
        return 3


def test_an_extra_state_of_a_module_is_refused() -> None:
    told = refusal(lambda: names_of(Stages([nn.Sequential(WithExtraState(2, 2))])))
    assert "module '0', a WithExtraState, has extra state (get_extra_state)" in told


class Named(nn.Module):
    """Layers one after another, under the names given."""

    def __init__(self, order: list[str], **layers: nn.Module) -> None:
        super().__init__()
        self.order = order
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.order:
            x = torch.tanh(self.get_submodule(name)(x))
        return x


def train_tied(rank: int, folder: Path, num_stages: int) -> list[float]:
    """The model registers its head first, which the last stage of two has."""
    torch.manual_seed(num_stages)
    head, body = nn.Linear(6, 6, bias=False).double(), nn.Linear(6, 6).double()
    head.weight = body.weight
    whole, parts = (
        [Named(["body", "head"], head=head, body=body)],
        [Named(["body"], body=body), Named(["head"], head=head)],
    )
    with Pipeline(
        Stages(parts if num_stages == 2 else whole), plan_on([*range(num_stages)], num_stages), loss_fn
    ) as pipeline:
        checkpoints = Checkpoints(folder, pipeline, optimizer := torch.optim.Adam(pipeline.parameters()))
        if checkpoints.load() is None:
            train(pipeline, optimizer, [batch(0)])
            checkpoints.save(1)
        return train(pipeline, optimizer, map(batch, range(1, 4)))


@pytest.mark.parametrize(("saving", "loading"), [(1, 2), (2, 1)])
def test_a_tied_weight_is_found_by_any_of_its_names(pool: Pool, tmp_path: Path, saving: int, loading: int) -> None:
    expected, *_ = pool.run(saving, train_tied, tmp_path, saving)
    tensors, _ = stored(tmp_path / "step-1")
    assert f"model/{('head', 'body')[saving - 1]}.weight" in tensors
    assert pool.run(loading, train_tied, tmp_path, loading) == [pytest.approx(expected, abs=1e-10)] * loading


def parallel(num_shards: int, by_mesh: bool) -> Pipeline:
    """A stage in shards, over the mesh or as a stage on several ranks of the plan, and a stage that is whole."""
    if by_mesh:
        mesh = rota.mesh(pp=1, tp=num_shards)
        group = mesh.get_group("tp") if num_shards > 1 else None
        modules = [ParallelLayer(0, group), GatheredLayer(1, group)]
        return Pipeline(
            Stages(modules), gpipe(place(Costs.uniform(2), Cluster.uniform(1), [0, 0]), 4), loss_fn, mesh=mesh
        )
    ranks = range(num_shards)
    group = spmd.group(ranks)
    modules = [ParallelLayer(0, group), GatheredLayer(1, group)]
    placement = place(Costs.uniform(2), Cluster.uniform(num_shards), [tuple(ranks)] * 2)
    return Pipeline(Stages(modules), gpipe(placement, 4), loss_fn)


def train_in_shards(rank: int, folder: Path, num_shards: int, by_mesh: bool) -> list[float]:
    with parallel(num_shards, by_mesh) as pipeline:
        optimizer = torch.optim.Adam(pipeline.parameters(), lr=0.05)
        checkpoints = Checkpoints(folder, pipeline, optimizer)
        losses = []
        if checkpoints.load() is None:
            losses = train(pipeline, optimizer, map(batch_of_four, range(2)))
            checkpoints.save(2)
        return losses + train(pipeline, optimizer, map(batch_of_four, range(2, 4)))


def batch_of_four(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch_of(4, seed=step)


def load_in_shards(rank: int, folder: Path, num_shards: int) -> str:
    with parallel(num_shards, by_mesh=True) as pipeline:
        return refusal(lambda: Checkpoints(folder, pipeline, None).load())


def test_parts_resume_on_as_many_ranks(pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (whole,) = pool.run(1, train_in_shards, tmp_path / "whole", 1, False)
    for saving in (False, True):
        folder = tmp_path / f"by mesh {saving}"
        assert pool.run(2, train_in_shards, folder, 2, saving) == [pytest.approx(whole, abs=1e-10)] * 2
        tensors, _ = stored(folder / "step-2")
        assert {"model/up#0", "model/up#1", "model/out.weight", "optimizer/up#1/exp_avg"} <= {*tensors}
        for loading in (False, True):
            assert pool.run(2, train_in_shards, folder, 2, loading) == [pytest.approx(whole[2:], abs=1e-10)] * 2
        (told,) = pool.run(1, load_in_shards, folder, 1)
        assert "up was saved in 2 TP shards, but has 1 here" in told
        assert "resume on as many tensor-parallel ranks" in told
        assert main(["checkpoint", "verify", str(folder)]) == 0
        assert main(["checkpoint", "export", str(folder), "-o", str(tmp_path / "model.safetensors")]) == 2
        assert "in 2 TP shards, and does not say how to join them" in capsys.readouterr().err


def train_shards(rank: int, folder: Path, run: Run, shard: bool) -> list[float]:
    untied = model()
    untied[-1].linear.weight = nn.Parameter(untied[0].linear.weight.detach().clone())
    stages = split(untied, run.plan().num_stages)
    if shard:
        mesh = run.mesh()
        for stage in stages.modules:
            fully_shard(stage, mesh=mesh["dp"])
    with Training(run, stages) as training:
        checkpoints = training.checkpoints(folder)
        losses = []
        if checkpoints.load() is None:
            losses = training.steps(range(2))
            checkpoints.save(2)
        return losses + training.steps(range(2, 6))


@pytest.mark.parametrize("further", [(), pytest.param((Run("zb", 2, 2),), marks=pytest.mark.sweep)], ids=["", "zb"])
def test_shards_are_saved_as_wholes(
    pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str], further: tuple[Run, ...]
) -> None:
    on_one, sharded = Run("1f1b", 1), Run("1f1b", 1, 2)
    (expected,) = pool.run(1, train_shards, tmp_path / "whole", on_one, False)
    for run in (sharded, *further):
        pool.renew()
        by_rank = pool.run(run.num_processes, train_shards, tmp_path / run.name, run, True)
        assert by_rank == [pytest.approx(expected, abs=1e-10)] * run.num_processes
        whole, shards = (stored(tmp_path / name / "step-2")[0] for name in ("whole", run.name))
        torch.testing.assert_close(shards, whole, rtol=1e-10, atol=1e-10)
        assert pool.run(1, train_shards, tmp_path / run.name, on_one, False) == [pytest.approx(expected[2:], abs=1e-10)]
        for source in ("whole", sharded.name):
            pool.renew()
            for losses in pool.run(run.num_processes, train_shards, tmp_path / source, run, True):
                assert losses == pytest.approx(expected[2:], abs=1e-10)


# --- checkpoints that cannot be saved, or do not fit: refused on all ranks, and nothing changes -----------------------


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
