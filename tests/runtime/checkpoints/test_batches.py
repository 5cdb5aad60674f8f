"""Batches that go on where another process has left: each sample once per epoch, and the same random numbers."""

import json
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from rota import PipelineError
from rota.core.reading import Field
from rota.runtime.checkpoints.batches import Batches
from rota.runtime.fingerprints import fingerprint

NUM_SAMPLES, NUM_EPOCHS = 11, 3


class Samples(Dataset[Tensor]):
    """A sample is its number, and random numbers as augmentation draws them."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> Tensor:
        return torch.tensor([number, torch.rand(()), random.random(), numpy.random.rand()])


class Stream(IterableDataset[Tensor]):
    """Shuffles within a buffer, drawing whenever it is asked for one more."""

    def __iter__(self) -> Iterator[Tensor]:
        buffer: list[int] = []
        for number in [*range(NUM_SAMPLES), *[-1] * 4]:
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
