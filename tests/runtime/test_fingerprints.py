"""Ranks that were given other rows than they should: seen in the first step, with the remedy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import rota
from rota import Pipeline, PipelineError
from rota.runtime.fingerprints import fingerprints
from support.networks import WIDTH, chain, loss_fn, plan_for
from support.pool import Pool, on_ranks

SIZE = 64


def only(value: Any) -> str:
    (found,) = fingerprints("inputs", [value]).values()
    return found[0]


def test_equal_bytes_have_equal_fingerprints() -> None:
    x = torch.randn(6, 4)
    assert only(x) == only(x.clone()) == only(x.t().contiguous().t())
    assert only(torch.arange(3)[2::2]) == only(torch.tensor([2]))  # one row, as a replica may get: its stride is 2
    scalar, empty = torch.tensor(1.0), torch.zeros(0)
    different = [x, x + 1, x.double(), x.view(4, 6), x[:5], x.bfloat16(), scalar, empty, "a", 1]
    assert len({only(value) for value in different}) == len(different)
    assert only(({"a": x, "b": [1, x]},)) not in (only(({"a": x, "b": [2, x]},)), only(({"a": x, "c": [1, x]},)))
    assert only(x.to_sparse()) == only(object()) == ""  # not compared


def dataset() -> Dataset[Any]:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(*torch.randn(2, SIZE, WIDTH, generator=generator, dtype=torch.float64))


Loader = Callable[[Pipeline, int], Any]


def right(pipeline: Pipeline, rank: int) -> Any:
    return DataLoader(dataset(), batch_size=16, sampler=pipeline.sampler(dataset()))


def default_numbers(pipeline: Pipeline, rank: int) -> Any:
    return DataLoader(dataset(), batch_size=16, sampler=DistributedSampler(dataset()))


def own_seeds(pipeline: Pipeline, rank: int) -> Any:
    torch.manual_seed(rank)
    return DataLoader(dataset(), batch_size=16, shuffle=True)


def no_sampler(pipeline: Pipeline, rank: int) -> Any:
    return DataLoader(dataset(), batch_size=16)


def first_step(rank: int, loader: Loader, dp: int, whole: bool, **options: Any) -> str:
    """What is refused, or "". `whole`: all ranks give the whole batch, else only what they read."""
    state = torch.get_rng_state()
    mesh = rota.mesh(pp=2, dp=dp)
    try:
        with Pipeline(chain(2), plan_for(2), loss_fn, mesh=mesh, **options) as pipeline:
            assert (pipeline.reads_inputs, pipeline.reads_targets) == (pipeline.rank == 0, pipeline.rank == 1)
            x, target = next(iter(loader(pipeline, rank)))
            if not whole:
                x, target = x if pipeline.reads_inputs else None, target if pipeline.reads_targets else None
            pipeline.step(x, target)
    except PipelineError as error:
        return str(error)
    finally:
        torch.set_rng_state(state)
    return ""


SAMPLER = "DataLoader(dataset, batch_size=…, sampler=pipeline.sampler(dataset"
WRONG: dict[str, tuple[Loader, int, list[str]]] = {
    "a DistributedSampler": (
        default_numbers,
        1,
        ["rank 0 and rank 1 are of one pipeline, but were given different inputs[0] (first in micro-batch 0)", SAMPLER],
    ),
    "a DistributedSampler on replicas": (default_numbers, 2, ["rank 0 of replica 0 and rank 1 of replica 0 are"]),
    "seeds": (own_seeds, 1, ["were given different inputs[0]", SAMPLER, "torch.manual_seed", "accelerator.prepare"]),
    "no sampler": (no_sampler, 2, ["replicas 0 and 1 were given the same data", "With a DataLoader", SAMPLER]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_loaders_are_told_on_all_ranks(pool: Pool, case: str) -> None:
    loader, dp, messages = WRONG[case]
    by_rank = pool.run(2 * dp, first_step, loader, dp, True)
    assert len({*by_rank}) == 1
    assert [message for message in messages if message not in by_rank[0]] == [], by_rank[0]


def test_right_loaders_are_not_refused(pool: Pool) -> None:
    assert pool.run(4, first_step, right, 2, True) == [""] * 4
    assert pool.run(4, first_step, right, 2, False) == [""] * 4
    assert pool.run(2, first_step, right, 1, True) == [""] * 2
    assert pool.run(2, first_step, no_sampler, 1, True) == [""] * 2


@on_ranks(2)
def test_nothing_is_compared_if_told_so(rank: int) -> None:
    assert first_step(rank, default_numbers, 1, True, check_data="never") == ""


def later(rank: int, check_data: Any) -> str:
    """The second batch differs between ranks; what is refused."""
    with Pipeline(chain(2), plan_for(2), loss_fn, check_data=check_data) as pipeline:
        batches: list[Tensor] = [torch.ones(8, WIDTH).double(), torch.ones(8, WIDTH).double() + rank]
        try:
            for batch in batches:
                pipeline.step(batch, batch)
        except PipelineError as error:
            return str(error)
    return ""


def test_always_looks_at_every_batch_and_first_at_one(pool: Pool) -> None:
    assert pool.run(2, later, "first") == [""] * 2
    assert all("were given different inputs[0]" in told for told in pool.run(2, later, "always"))


def test_other_words_are_refused() -> None:
    wrong: Any = "often"
    with pytest.raises(PipelineError, match="check_data='often'; say 'first', 'always' or 'never'"):
        Pipeline(chain(2), plan_for(2), loss_fn, check_data=wrong)


def numbers(rank: int) -> list[list[int]]:
    with Pipeline(chain(2), plan_for(2), loss_fn, mesh=rota.mesh(pp=2, dp=2)) as pipeline:
        return [
            [*pipeline.sampler(range(7), shuffle=False)],  # type: ignore[arg-type]
            [*pipeline.sampler(range(7), shuffle=False, drop_last=True)],  # type: ignore[arg-type]
            [*pipeline.sampler(range(7), seed=1)],  # type: ignore[arg-type]
        ]


def test_a_sampler_deals_rows_over_replicas(pool: Pool) -> None:
    by_rank = pool.run(4, numbers)
    assert by_rank[0] == by_rank[1]
    assert by_rank[2] == by_rank[3]
    assert [found[:2] for found in by_rank[::2]] == [[[0, 2, 4, 6], [0, 2, 4]], [[1, 3, 5, 0], [1, 3, 5]]]
    assert {*by_rank[0][2], *by_rank[2][2]} == {*range(7)}
