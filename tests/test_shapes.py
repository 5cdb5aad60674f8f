"""Placements by their pictures."""

import pytest

from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.errors import PlacementError
from rota.core.tasks import Kind
from rota.shapes import k_shape, m_shape
from support.tessel_shapes import tessel

ALL = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [
        ("v", [(0,), (1,), (2,), (3,)]),
        ("x", [(0,), (1,), (2,), (3,), (3,), (2,), (1,), (0,)]),
        ("m", [ALL, (0,), (1,), (2,), (3,)]),
        ("nn", [ALL, (0,), (1,), ALL, (2,), (3,)]),
        ("nn-eager", [ALL, (0,), ALL, (1,), (2,), (3,)]),
        ("k", [(0,), (1,), (2,), (3,), ALL]),
    ],
)
def test_ranks(shape: str, ranks: list[tuple[int, ...]]) -> None:
    assert [task.ranks for task in tessel(shape, 4).tasks if task.kind is Kind.F] == ranks


def test_branches_meet() -> None:
    """K's branches do not feed each other, only the shared stage."""
    assert tessel("k", 6).stage_edges == ((0, 1), (1, 2), (3, 4), (4, 5), (2, 6), (5, 6))


def test_errors() -> None:
    costs = Costs.uniform(4)
    with pytest.raises(PlacementError, match="m_shape needs 5 stages on its 4 ranks, not 4"):
        m_shape(costs, Cluster.uniform(4))
    with pytest.raises(PlacementError, match=r"even number of ranks.* not 3; use 4"):
        k_shape(costs, Cluster.uniform(3))
