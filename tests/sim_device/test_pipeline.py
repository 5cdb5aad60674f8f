"""Pipelines on simulated devices: the unsplit model's values, no race, and no wait of the host inside a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rota
from gpu import test_as_on_the_cpu as on_devices
from rota import Cluster, Costs, Pipeline, place, spmd
from rota.core.programs.device_steps import COMPUTE
from rota.runtime.device.streams import StreamDevice
from rota.runtime.reducing.replicas import GradientAllReduce
from rota.schedules import gpipe
from runtime import (
    test_boundaries,
    test_inference,
    test_random_orders,
    test_sequence_chunks,
    test_spmd,
    test_unused_outputs,
)
from runtime.gradients import test_recompute
from runtime.reducing import test_replicas, test_shared_weights
from support.networks import (
    assert_as_unsplit,
    batch_of,
    chain,
    family_cases,
    loss_fn,
    plan_for,
)
from support.pool import Pool
from support.sampling import some
from support.sim_device import SimDevice
from support.sim_device.groups import SIM, SimGroup
from support.sim_device.pool import SimPool

pytestmark = pytest.mark.dist


#: A tied gradient that was changed between two steps of a round may have been zeroed: the host looks.
ZEROED = ("shared_weights.py",)


@pytest.fixture
def sim_pool(pool: Pool) -> SimPool:
    return SimPool(pool, ZEROED)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_every_family(sim_pool: SimPool, num_ranks: int) -> None:
    """Those of two streams are in `test_both_directions`."""
    assert_as_unsplit(sim_pool, num_ranks, family_cases(num_ranks))


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.sweep)])
def test_random_orders_of_graphs_and_shared_stages(sim_pool: SimPool, num_ranks: int) -> None:
    test_random_orders.run_and_compare(sim_pool, num_ranks, range(some(12)))  # type: ignore[arg-type]


def test_values_that_nobody_uses(pool: Pool) -> None:
    """The stages ask which micro-batch they have, and wait for that."""
    sim_pool = SimPool(pool, (*ZEROED, "test_unused_outputs.py"))
    test_unused_outputs.run_and_compare(sim_pool, 2, range(2))


@pytest.mark.parametrize("case", ["nested", "large"])
def test_values_between_stages(sim_pool: SimPool, case: str) -> None:
    test_boundaries.test_boundary(sim_pool, case)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", ["ends", "partly on one rank", "split backward", "recomputed"])
def test_tied_weights(sim_pool: SimPool, case: str) -> None:
    test_shared_weights.test_tied(sim_pool, case)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", ["chimera on 2", "one micro-batch"])
def test_both_directions(sim_pool: SimPool, case: str) -> None:
    test_shared_weights.test_two_streams(sim_pool, case)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "test",
    [
        test_shared_weights.test_frozen_ties_stay_without_gradients,
        test_recompute.test_split_backwards_and_some_stages,
        test_replicas.test_odd_parameters,
        test_replicas.test_dropout_differs_between_replicas_and_is_one_on_all_parts,
    ],
    ids=lambda test: test.__name__,
)
def test_as_on_the_cpu(sim_pool: SimPool, test: Callable[[SimPool], None]) -> None:
    test(sim_pool)


@pytest.mark.parametrize("user", [None, 2])
def test_a_tie_that_is_used_by_one_rank_of_one_replica(sim_pool: SimPool, user: int | None) -> None:
    test_replicas.test_a_tie_that_is_used_by_one_rank_of_one_replica(sim_pool, user)  # type: ignore[arg-type]


def kernels_of_reductions(rank: int) -> list[int]:
    """Of 3 and 300 parameters, with all gradients and with every other one, from the second reduction on."""
    group, counts = dist.new_group(backend="sim"), []
    with SimDevice(f"rank {rank}").checked() as hardware:
        device = StreamDevice(SIM)
        device.begin()
        compute, beside = device.stream(COMPUTE), device.stream("replicas")
        for num, every in itertools.product((3, 300), (1, 2)):
            parameters = [nn.Parameter(torch.ones(2, 3, device="sim")) for _ in range(num)]
            reduced = GradientAllReduce(parameters, group, device, 2)
            for step in range(2):
                for i, parameter in enumerate(parameters):
                    gradient = torch.full((2, 3), float(i), device="sim")
                    parameter.grad = gradient if rank or i % every == 0 else None
                before = hardware.num_kernels
                device.wait(beside, device.record(compute))
                device.wait(compute, reduced.start(beside))
                reduced.finish()
                counts += [hardware.num_kernels - before] * step
            del reduced  # while the device may still copy from its buffers
            means = [i / (1 + (i % every > 0)) for i in range(num)]
            assert [parameter.grad.mean().item() for parameter in parameters if parameter.grad is not None] == means
    return counts


def test_a_reduction_is_a_few_kernels_whatever_the_number_of_parameters(pool: Pool) -> None:
    for of_three, with_absent, of_many, of_many_with_absent in pool.run(2, kernels_of_reductions):
        assert of_three == of_many == 4  # copied in, added up, divided, copied back
        assert with_absent == of_many_with_absent < 10


@pytest.mark.parametrize(("pp", "dp"), [(2, 2), (3, 1)])
def test_replicas_that_accumulate(sim_pool: SimPool, pp: int, dp: int) -> None:
    test_replicas.test_gradients_add_up_over_steps_with_and_without_sync(sim_pool, pp, dp)  # type: ignore[arg-type]


def test_values_that_are_not_contiguous(sim_pool: SimPool) -> None:
    on_devices.test_values_that_are_not_contiguous(sim_pool)  # type: ignore[arg-type]


def test_dropout_is_the_same_in_schedules_that_draw_in_different_orders(sim_pool: SimPool) -> None:
    on_devices.test_dropout_is_the_same_in_schedules_that_draw_in_different_orders(sim_pool)  # type: ignore[arg-type]


def fails_while_its_device_is_busy(rank: int) -> list[bool]:
    """Of each communicator whether it has a kernel that the device has not ended, when the pipeline has."""
    made = list[SimGroup]()
    with patch.object(SimGroup, "made", made), suppress(KeyError), Pipeline(chain(2), plan_for(2), loss_fn) as pipeline:
        pipeline.step(*batch_of(4))
        pipeline.begin_step(*batch_of(4))
        assert any(group.is_busy() for group in made)
        raise KeyError
    return [group.is_busy() for group in made]


def test_what_a_failed_rank_leaves_on_its_device_is_aborted(sim_pool: SimPool) -> None:
    """Or leaving a group would wait for kernels that wait for other ranks."""
    for are_busy in sim_pool.run(2, fails_while_its_device_is_busy):
        assert are_busy
        assert not any(are_busy)


def test_stages_on_several_ranks(sim_pool: SimPool) -> None:
    test_spmd.test_stages_on_several_ranks(sim_pool, "M with a head", False)  # type: ignore[arg-type]


def communicators_of_steps(rank: int, pp: int) -> int:
    """How many a rank has: of 4 ranks, or of 2 with replicas and a tie."""
    mesh = rota.mesh(pp=pp, dp=4 // pp)
    ranks: test_spmd.Ranks = [(0, 1), (2, 3), (0, 1), (3,)] if pp == 4 else [(0,), (1,), (0,)]
    with patch.object(SimGroup, "made", list[SimGroup]()) as made:
        groups = {on: spmd.group(on, mesh) for on in dict.fromkeys(ranks)}
        stages = test_spmd.stages_on(ranks, [(a, a + 1) for a in range(len(ranks) - 1)], groups)
        if pp == 2:
            stages[2].linear.weight = stages[1].linear.weight  # type: ignore[union-attr]
        plan = gpipe(place(Costs.uniform(len(ranks)), Cluster.uniform(pp), ranks), 4)
        with Pipeline(stages, plan, loss_fn, mesh=mesh) as pipeline:
            pipeline.step(*batch_of(4, pipeline.replica))
        return sum(group.is_open for group in made)


@pytest.mark.parametrize("pp", [4, 2])
def test_no_communicator_is_made_in_a_step(sim_pool: SimPool, pp: int) -> None:
    """Its hosts would wait for each other, which `sim_pool` refuses in first steps, too."""
    assert min(sim_pool.run(4, communicators_of_steps, pp)) > 1


def test_evaluation(sim_pool: SimPool) -> None:
    test_inference.test_batch_norm(sim_pool, "K", True)  # type: ignore[arg-type]


def test_chunks_of_samples(pool: Pool) -> None:
    """A pinned batch is cut into parts that are not pinned, so that copies of them wait."""
    test = test_sequence_chunks.test_plans_per_step_of_replicas_that_have_other_chunks
    test(SimPool(pool, (*ZEROED, "microbatch_inputs.py")), 1, "none")  # type: ignore[arg-type]
