"""What ranks measure and compute, on real processes: also that what is wrong there is found."""

from typing import Any

import pytest
import torch
from torch import nn

from rota.diagnosis.examination import TOLERANCE
from rota.diagnosis.rank import examine_together, measure_links, plan_of, train
from support.pool import Pool

CPU = torch.device("cpu")


def examined(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    examine_together(lambda name, result: found.update({name: result}))
    return found


@pytest.mark.dist
def test_the_first_rank_gets_all_results(pool: Pool) -> None:
    first, *others = pool.run(2, examined)
    assert others == [{}]
    assert [rank["device"] for rank in first["ranks"]] == ["cpu", "cpu"]
    assert len(first["links"]) == 1
    assert first["self_test"] <= TOLERANCE


def links_of(rank: int) -> list[dict[str, Any]]:
    return measure_links(CPU, lambda: None)


@pytest.mark.dist
def test_each_pair_is_measured(pool: Pool) -> None:
    first, *others = pool.run(3, links_of)
    assert others == [first] * 2
    assert [link["ranks"] for link in first] == [[0, 1], [0, 2], [1, 2]]
    assert min(min(link["latency_ns"], link["bytes_per_s"]) for link in first) > 0


def wrongly(rank: int, on: int, factor: float) -> float:
    """One rank computes something else than the others think."""
    right = nn.Tanh.forward
    if rank == on:
        nn.Tanh.forward = lambda self, x: torch.tanh(x) * factor  # type: ignore[method-assign]
    try:
        return train(plan_of(2), CPU)
    finally:
        nn.Tanh.forward = right  # type: ignore[method-assign]


@pytest.mark.dist
def test_what_one_rank_computes_wrongly_is_found(pool: Pool) -> None:
    assert max(pool.run(2, wrongly, 1, 1 + 1e-8)) > TOLERANCE
