"""Losses, counts, metrics, scalers and norms on simulated devices: the CPU's values, and no wait of the host in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rota import Pipeline, PipelineError, Stages
from runtime import test_added_losses, test_losses, test_nonfinite_loss, test_precision, test_step_handles
from runtime.reducing import test_loss_counts, test_norms
from support.networks import batch_of, chain
from support.pool import Pool
from support.sim_device import RaceError, SimDevice
from support.sim_device.pool import SimPool, on_cpu


@pytest.fixture
def sim_pool(pool: Pool) -> SimPool:
    return SimPool(pool)


# --- the tests of the CPU ---------------------------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.parametrize(
    "test",
    [
        test_losses.test_a_loss_of_the_output_alone,
        test_losses.test_metrics_may_come_later,
        test_losses.test_refused_on_all_ranks,
        test_losses.test_low_precision_does_not_overflow,
        test_loss_counts.test_two_ranks,
        test_loss_counts.test_four_ranks,
        test_loss_counts.test_unequal_counts_on_replicas,
        test_added_losses.test_two_ranks,
        test_added_losses.test_replicas,
        test_added_losses.test_a_stage_may_be_trained_by_its_added_loss_alone,
        test_added_losses.test_counts_must_fit_the_loss,
        test_nonfinite_loss.test_replicas_and_streams_name_the_rank,
        test_norms.test_norms_of_any_type_are_torchs_of_the_whole_model,
        test_step_handles.test_all_ranks_wait_or_none,
        test_step_handles.test_all_ranks_stop_alike,
        test_step_handles.test_handles_tell_what_steps_would_have_raised,
    ],
    ids=lambda test: test.__name__,
)
def test_as_on_the_cpu(sim_pool: SimPool, test: Callable[[SimPool], None]) -> None:
    test(sim_pool)
