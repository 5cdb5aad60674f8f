"""Tests written for the CPU, with all stages on accelerators: graphs, stages on several ranks, two streams.

On simulated devices there is no race, and no host waits inside a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rota import Plan, Stages
from runtime import (
    test_boundaries,
    test_inference,
    test_losses,
    test_random_orders,
    test_random_state,
    test_sequence_chunks,
    test_spmd,
    test_step_handles,
    test_unused_outputs,
)
from runtime.gradients import test_recompute
from runtime.reducing import test_replicas, test_shared_weights
from support.networks import StepResult, assert_as_unsplit, batch_of, family_cases, pipeline_steps, plan_for, stages_of
from support.pool import Pool


@pytest.fixture
def pool(ranks: Any) -> Any:
    """For tests that were written for `support.pool.Pool`."""
    return ranks


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    "environment",
    [
        {},
        # One queue in hardware: kernels start in the order of their launch, so a wrong order would hang.
        {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        # PyTorch raises where two streams touch memory unordered. It does not see into NCCL's kernels.
        {"TORCH_CUDA_SANITIZER": "1"},
    ],
    ids=str,
)
def test_every_family(pool: Any, hardware: Any, num_ranks: int, environment: dict[str, str]) -> None:
    if environment and hardware.place.kind != "cuda":
        pytest.skip("is for CUDA")
    pool.environment = environment
    assert_as_unsplit(pool, num_ranks, family_cases(num_ranks))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_random_orders_of_graphs_and_shared_stages(pool: Pool, hardware: Any, num_ranks: int) -> None:
    test_random_orders.run_and_compare(pool, num_ranks, range(30 if hardware.is_real else 2))


@pytest.mark.parametrize(
    "test",
    [
        *((test_shared_weights.test_tied, case) for case in test_shared_weights.TIED),
        *((test_shared_weights.test_two_streams, case) for case in test_shared_weights.STREAMS),
        *((test_spmd.test_stages_on_several_ranks, case, True) for case in test_spmd.CASES),
        *((test_step_handles.test_values_are_those_of_steps_that_wait, form) for form in test_step_handles.FORMS),
        *((test_replicas.test_gradients_add_up_over_steps_with_and_without_sync, pp, 2) for pp in (1, 2)),
        *((test_inference.test_batch_norm, name, True) for name in ("V", "K")),
        *((test_boundaries.test_boundary, case) for case in ("nested", "large")),
        (test_sequence_chunks.test_plans_per_step_of_replicas_that_have_other_chunks, 1, "none"),
        (test_unused_outputs.run_and_compare, 2, range(2)),
        (test_losses.test_metrics_may_come_later,),
        (test_losses.test_refused_on_all_ranks,),
        (test_losses.test_low_precision_does_not_overflow,),
        (test_losses.test_added_losses_of_replicas,),
        (test_losses.test_a_stage_may_be_trained_by_its_added_loss_alone,),
        (test_step_handles.test_all_ranks_wait_or_none,),
        (test_step_handles.test_forwards_alone,),
        (test_step_handles.test_all_ranks_stop_alike,),
        (test_step_handles.test_handles_tell_what_steps_would_have_raised,),
        (test_shared_weights.test_frozen_ties_stay_without_gradients,),
        (test_recompute.test_split_backwards_and_some_stages,),
        (test_recompute.test_beside_stages_that_the_plan_recomputes,),
        (test_random_state.test_dropout,),
        (test_replicas.test_odd_parameters,),
        (test_replicas.test_evaluation_of_replicas,),
        (test_replicas.test_dropout_differs_between_replicas_and_is_one_on_all_parts,),
    ],
    ids=lambda test: " ".join([test[0].__name__.removeprefix("test_"), *map(str, test[1:])]),
)
def test_others(pool: Pool, test: tuple[Callable[..., None], Any]) -> None:
    test[0](pool, *test[1:])


def turned(linear: nn.Linear, x: Tensor) -> Tensor:
    return torch.tanh(linear(x)).t()


def turned_back(linear: nn.Linear, x: Tensor) -> Tensor:
    """Its gradient is not contiguous either."""
    return torch.tanh(linear(x.t()))


def test_values_that_are_not_contiguous(pool: Pool) -> None:
    """A send copies them on its own stream, so the originals are held until then, too."""

    stages = stages_of(turned, turned_back)
    assert_as_unsplit(pool, 2, [(stages, plan_for(2), [batch_of(4, step) for step in (1, 2)])])


def dropout_steps(rank: int, plan: Plan) -> list[StepResult]:
    torch.manual_seed(0)
    stages = Stages([nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).double() for _ in range(2)])
    return pipeline_steps(rank, stages, plan, [batch_of(4, step) for step in (1, 2)], recompute="full")


def test_dropout_is_the_same_in_schedules_that_draw_in_different_orders(pool: Pool) -> None:
    chimera = test_shared_weights.STREAMS["chimera on 2"]
    by_rank, others = (pool.run(2, dropout_steps, plan) for plan in (plan_for(2), chimera))
    for step in range(2):
        whole = by_rank[0][step].gradients | by_rank[1][step].gradients
        for results in others:
            assert abs(results[step].loss - by_rank[0][step].loss) < 1e-12
            for (stage, name), gradient in results[step].gradients.items():  # of both streams
                torch.testing.assert_close(gradient, whole[stage % 2, name], rtol=1e-12, atol=1e-12)
