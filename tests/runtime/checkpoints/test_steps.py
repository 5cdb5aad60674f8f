"""`Checkpoints.steps`: on replicas; and what it keeps of a loop."""

import json
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

import rota
from rota import Checkpoints, Cluster, Costs, Pipeline, PipelineError, Plan, place
from rota.core.reading import Field
from rota.runtime.checkpoints.batches import Batches
from rota.runtime.fingerprints import fingerprint
from rota.schedules import one_f_one_b
from support.networks import refusal
from support.pool import Pool, on_ranks

NUM_REPLICAS, NUM_ROWS, NUM_SAMPLES = 2, 8, 21  # 3 steps per epoch; replicas see a sample twice in the last one
PLAN = one_f_one_b(place(Costs.uniform(2, 100, 200), Cluster.uniform(2)), 2)

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
def test_an_epoch_goes_on_on_replicas(pool: Pool, tmp_path: Path, loads: str) -> None:
    """Ended in the first epoch, and begun again."""
    everyone = NUM_REPLICAS * PLAN.num_ranks
    expected = of_all(pool.run(everyone, train, PLAN, tmp_path / "undisturbed", loads))
    found = of_all(pool.run(everyone, train, PLAN, tmp_path / "disturbed", loads, 2))
    found += of_all(pool.run(everyone, train, PLAN, tmp_path / "disturbed", loads))
    assert [(step, numbers) for step, _, numbers in found] == [(step, numbers) for step, _, numbers in expected]
    assert [loss for _, loss, _ in found] == pytest.approx([loss for _, loss, _ in expected], abs=1e-12, rel=0)
    for epoch in (found[:3], found[3:]):
        assert {number for *_, numbers in epoch for number in numbers} == {*range(NUM_SAMPLES)}


def test_the_number_of_replicas_may_change_between_two_epochs(pool: Pool, tmp_path: Path) -> None:
    first = of_all(pool.run(NUM_REPLICAS * PLAN.num_ranks, train, PLAN, tmp_path, "own rows", 3))
    then = of_all(pool.run(PLAN.num_ranks, train, PLAN, tmp_path, "own rows"))
    assert [step for step, *_ in first + then] == [*range(6)]
    for epoch in (first, then):
        assert {number for *_, numbers in epoch for number in numbers} == {*range(NUM_SAMPLES)}


@pytest.mark.parametrize(
    ("then", "call"), [("save", "Checkpoints.save()"), ("epoch", "Checkpoints.steps() for another epoch")]
)
@on_ranks(2)
def test_a_rank_with_fewer_batches_is_told_on_all_ranks(rank: int, tmp_path: Path, then: str, call: str) -> None:
    """The last rank has a batch less, and saves or begins the next epoch when the other one takes a step."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    loader = [torch.ones(8, 4)] * (3 - rank)
    with Pipeline(rota.split(model, 2), PLAN, nn.functional.mse_loss) as pipeline:
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.01)
        checkpoints = Checkpoints(tmp_path, pipeline, optimizer)

        def run_out_of_batches() -> None:
            for _, x in checkpoints.steps(loader, num_epochs=2 if then == "epoch" else 1):
                pipeline.step(x, x)
                optimizer.step()
                optimizer.zero_grad()

        told = refusal(run_out_of_batches)
    assert told == (
        f"the ranks make different calls at once: rank 0 calls step(); rank 1 calls {call}; make the same calls in "
        f"the same order on all ranks"
    )


@on_ranks(2)
def test_steps_are_counted_from_the_begin_of_the_training(rank: int, tmp_path: Path) -> None:
    """Errors and progress of the third step, in processes that have begun only one."""
    x = torch.ones(8, 4)
    for _ in range(2):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with Pipeline(rota.split(model, 2), PLAN, nn.functional.mse_loss) as pipeline:
            optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.01)
            checkpoints = Checkpoints(tmp_path, pipeline, optimizer)
            found = checkpoints.load()
            if found is None:
                checkpoints.save(2)
            else:
                assert refusal(pipeline.step, x * torch.nan, x).startswith("step 3: the mean loss is nan")
                assert pipeline._engine.watchdog.last().endswith(" in step 3")
                assert pipeline.num_steps == 1


def scale(rank: int, folder: Path, last: int, num_scalers: int = 1) -> list[tuple[float, float]]:
    """The loss and the scale of each step before `last`. The first scale is too large, so that steps are skipped."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    loader = [torch.randn(8, 4) for _ in range(8)]
    found = []
    with Pipeline(rota.split(model, 2), PLAN, nn.functional.mse_loss) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.01)
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2) for _ in range(num_scalers)]
        checkpoints = Checkpoints(folder, pipeline, optimizer)
        for step, x in checkpoints.steps(loader, save_every=1):
            if step == last:
                break
            scaler = scalers[step % num_scalers]
            loss = pipeline.step(x, 100 * x.flip(1), scaler=scaler)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            pipeline.evaluate(x, x)
            found.append((loss, scaler.get_scale()))
    return found


def test_a_scaler_goes_on(pool: Pool, tmp_path: Path) -> None:
    expected = pool.run(2, scale, tmp_path / "undisturbed", 8)[0]
    found = [step for last in (5, 8) for step in pool.run(2, scale, tmp_path / "disturbed", last)[0]]
    assert found == expected
    scales = [of_step for _, of_step in expected]
    assert scales[0] == 2.0**126, "no step is skipped"
    assert max(scales[5:]) > min(scales[:5]), "the scale does not grow again"


@on_ranks(2)
def test_two_scalers_are_refused(rank: int, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="step was given 2 gradient scalers"):
        scale(rank, tmp_path, 3, num_scalers=2)


# --- batches that go on where another process has left: each sample once per epoch, and the same random numbers -------


NUM_STREAMED, NUM_EPOCHS = 11, 3


class Samples(Dataset[Tensor]):
    """A sample is its number, and random numbers as augmentation draws them."""

    def __len__(self) -> int:
        return NUM_STREAMED

    def __getitem__(self, number: int) -> Tensor:
        return torch.tensor([number, torch.rand(()), random.random(), numpy.random.rand()])


class Stream(IterableDataset[Tensor]):
    """Shuffles within a buffer, drawing whenever it is asked for one more."""

    def __iter__(self) -> Iterator[Tensor]:
        buffer: list[int] = []
        for number in [*range(NUM_STREAMED), *[-1] * 4]:
            if len(buffer) == 4 or (number < 0 and buffer):
                yield torch.tensor([buffer.pop(random.randrange(len(buffer))), torch.rand(())])
            if number >= 0:
                buffer.append(number)


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(Samples(), 3, shuffle=True),
    "workers": lambda: DataLoader(Samples(), 3, shuffle=True, num_workers=2),
    "generator": lambda: DataLoader(Samples(), 3, shuffle=True, generator=torch.Generator()),
    "distributed": lambda: DataLoader(Samples(), 2, sampler=DistributedSampler(Samples(), 2, 1)),
    "stream": lambda: DataLoader(Stream(), 3),
    "list": lambda: [torch.tensor([[float(number)]]) for number in range(4)],
}


def batches_of(loader: Any, num_epochs: int = NUM_EPOCHS, seed: int = 5) -> Batches:
    return Batches(loader, num_epochs, seed, 1, lambda value: [value])


def train_on(batches: Batches) -> list[tuple[dict[str, Any], list[Any]]]:
    """Each batch, and the position before the next. Training draws random numbers, too."""
    found = []
    for batch in batches:
        torch.rand(3), random.random(), numpy.random.rand()
        found.append((batches.position, batch.tolist()))
    return found


@pytest.mark.parametrize("name", LOADERS)
def test_a_restart_goes_on(name: str) -> None:
    whole = train_on(batches_of(LOADERS[name]()))
    per_epoch = len(whole) // NUM_EPOCHS
    epochs = [
        [int(row[0]) for _, batch in whole[i : i + per_epoch] for row in batch] for i in range(0, len(whole), per_epoch)
    ]
    assert all(len({*epoch}) == len(epoch) for epoch in epochs)
    if name != "distributed":  # each replica has other samples in each epoch
        assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    if name != "list":
        assert epochs[0] != epochs[1] != epochs[2], "not shuffled again"
    # Within, after and before the first batch of an epoch; with workers, which cost processes, once.
    for done in [per_epoch + 2] if name == "workers" else [0, 1, per_epoch - 1, per_epoch, per_epoch + 1, len(whole)]:
        batches = batches_of(LOADERS[name]())
        if done:
            batches.go_on(Field("data", whole[done - 1][0]))
        random.seed(done), torch.manual_seed(done)
        assert train_on(batches) == whole[done:]


def test_training_keeps_its_random_numbers() -> None:
    drawn = []
    for loader in (LOADERS["shuffled"](), [torch.zeros(1)] * 4):
        torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
        for _ in batches_of(loader, 1):
            drawn.append((torch.rand(()).item(), random.random(), numpy.random.rand()))
    assert drawn[:4] == drawn[4:]


def position(**changes: Any) -> Field:
    batches = batches_of(LOADERS["shuffled"]())
    next(iter(batches))
    return Field("data", {**batches.position, **changes})


def test_other_data_is_refused() -> None:
    for loader in (DataLoader(Samples(), 4, shuffle=True), DataLoader(Samples(), 3)):
        batches = batches_of(loader)
        batches.go_on(position())
        with pytest.raises(PipelineError, match=r"the first batch of epoch 0 differs from the one before"):
            next(iter(batches))
    batches = batches_of(LOADERS["shuffled"]())
    batches.go_on(position(num_batches=5))
    with pytest.raises(PipelineError, match=r"epoch 0 has 4 batches, but 5 of it were trained before"):
        next(iter(batches))
    with pytest.raises(PipelineError, match=r"seed=5, but the training has had the seed 6"):
        batches_of([]).go_on(position(seed=6))
    with pytest.raises(PipelineError, match=r"epoch 0 was begun by 2 replicas"):
        batches_of([]).go_on(position(num_replicas=2))
    batches_of([]).go_on(position(num_replicas=2, num_batches=0))


def test_after_the_last_batch_of_an_epoch_the_next_one_begins_with_any_number_of_replicas() -> None:
    """4 batches were the whole epoch: none of them is loaded again."""
    batches = batches_of(LOADERS["shuffled"]())
    batches.go_on(position(num_replicas=2, num_batches=4))
    assert (batches.position["epoch"], batches.position["num_batches"]) == (1, 0)
    whole = [*batches_of(LOADERS["shuffled"]())]
    assert len(whole) == 4 * NUM_EPOCHS
    for batch, expected in zip(batches, whole[4:], strict=True):
        assert torch.equal(batch, expected)


def replicas(mine: Any, others: Any) -> Batches:
    """The batches of the first process of two replicas."""

    def share(value: list[Any]) -> list[Any]:
        return [value, [value[0], fingerprint(next(iter(others)))]]

    return Batches(mine, 1, 5, 2, share)


def rows(*numbers: int) -> list[Tensor]:
    return [*torch.tensor(numbers).view(-1, 2)]


def go_on(*batches: Batches) -> int:
    """Load one batch with each in turn; returns how many are left of the epoch for the last."""
    for before, after in pairwise(batches):
        next(iter(before))
        after.go_on(Field("data", json.loads(json.dumps(before.position))))
    return len([*batches[-1]])


def test_other_data_of_another_replica_is_refused() -> None:
    mine, others = rows(0, 2, 4, 6, 8, 9), rows(1, 3, 5, 7, 0, 1)
    assert go_on(replicas(mine, others), replicas(mine, others)) == 2
    with pytest.raises(PipelineError, match=r"the first batch of epoch 0 on replica 1 differs from the one before"):
        go_on(replicas(mine, others), replicas(mine, others[1:]))


@pytest.mark.parametrize(
    ("loader", "options", "told"),
    [
        (iter([1]), {}, "a list_iterator can be iterated only once"),
        (3, {}, "a int has no batches"),
        (DataLoader(Samples(), num_workers=1, persistent_workers=True), {}, "persistent_workers=True"),
        ([], {"num_epochs": 0}, "num_epochs=0"),
        ([], {"seed": -1}, "seed=-1"),
    ],
)
def test_what_is_refused(loader: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(PipelineError, match=told):
        batches_of(loader, **options)
