"""Tests written for the CPU, with all stages on accelerators: graphs, stages on several ranks, two streams."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from runtime import test_inference, test_random_orders, test_random_state, test_spmd, test_step_handles
from runtime.gradients import test_recompute
from runtime.reducing import test_replicas, test_shared_weights
from support.gpu.ranks import RankPool
from support.networks import assert_as_unsplit, family_cases

UP_TO_FOUR = [pytest.param(number, marks=pytest.mark.gpu(number)) for number in (1, 2, 4)]


@pytest.mark.parametrize("num_ranks", UP_TO_FOUR[1:])
@pytest.mark.parametrize(
    "environment",
    [
        {},
        # One queue in hardware: kernels start in the order of their launch, so a wrong order would hang.
        pytest.param({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, marks=pytest.mark.cuda),
        # PyTorch raises where two streams touch memory unordered. It does not see into NCCL's kernels.
        pytest.param({"TORCH_CUDA_SANITIZER": "1"}, marks=pytest.mark.cuda),
    ],
    ids=str,
)
def test_every_family(rank_pool: RankPool, num_ranks: int, environment: dict[str, str]) -> None:
    rank_pool.environment = environment
    assert_as_unsplit(rank_pool, num_ranks, family_cases(num_ranks))


@pytest.mark.parametrize("num_ranks", UP_TO_FOUR)
def test_random_orders_of_graphs_and_shared_stages(rank_pool: RankPool, num_ranks: int) -> None:
    test_random_orders.run_and_compare(rank_pool, num_ranks, range(30))  # type: ignore[arg-type]


@pytest.mark.gpu(4)
@pytest.mark.parametrize("case", test_shared_weights.TIED)
def test_tied_weights(rank_pool: RankPool, case: str) -> None:
    test_shared_weights.test_tied(rank_pool, case)  # type: ignore[arg-type]


@pytest.mark.gpu(4)
@pytest.mark.parametrize("case", test_shared_weights.STREAMS)
def test_both_directions(rank_pool: RankPool, case: str) -> None:
    test_shared_weights.test_two_streams(rank_pool, case)  # type: ignore[arg-type]


@pytest.mark.gpu(4)
@pytest.mark.parametrize("case", test_spmd.CASES)
def test_stages_on_several_ranks(rank_pool: RankPool, case: str) -> None:
    test_spmd.test_stages_on_several_ranks(rank_pool, case, True)  # type: ignore[arg-type]


@pytest.mark.gpu(4)
@pytest.mark.parametrize(
    "test",
    [
        test_recompute.test_beside_stages_that_the_plan_recomputes,
        test_random_state.test_dropout,
        test_replicas.test_odd_parameters,
        test_replicas.test_evaluation_of_replicas,
        test_replicas.test_dropout_differs_between_replicas_and_is_one_on_all_parts,
    ],
    ids=lambda test: test.__name__,
)
def test_others(rank_pool: RankPool, test: Callable[[RankPool], None]) -> None:
    test(rank_pool)


@pytest.mark.parametrize(
    ("pp", "dp"), [pytest.param(1, 2, marks=pytest.mark.gpu(2)), pytest.param(2, 2, marks=pytest.mark.gpu(4))]
)
def test_replicas_that_accumulate(rank_pool: RankPool, pp: int, dp: int) -> None:
    test_replicas.test_gradients_add_up_over_steps_with_and_without_sync(rank_pool, pp, dp)  # type: ignore[arg-type]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("form", test_step_handles.FORMS)
def test_steps_that_overlap(rank_pool: RankPool, form: str) -> None:
    test_step_handles.test_values_are_those_of_steps_that_wait(rank_pool, form)  # type: ignore[arg-type]


@pytest.mark.gpu(4)
@pytest.mark.parametrize("name", ["V", "K"])
def test_evaluation(rank_pool: RankPool, name: str) -> None:
    test_inference.test_batch_norm(rank_pool, name, True)  # type: ignore[arg-type]
