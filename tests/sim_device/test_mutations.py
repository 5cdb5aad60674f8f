"""Each wait, hold and order that the runtime relies on is needed: without it, the simulated device finds an error."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

import rota
from rota import Cluster, Costs, Pipeline, Plan, Stages, place
from rota.core.programs.device_steps import DeviceProgram, Step
from rota.runtime import channels, execution
from rota.runtime.reducing import replicas
from rota.schedules import one_f_one_b
from support.networks import batch_of, chain, loss_fn
from support.pool import Pool
from support.sim_device import SimDevice, current_device
from support.sim_device.pool import pipelines_on_sim

pytestmark = pytest.mark.dist

NUM_MICROBATCHES = 4
BOTH = 2
#: What each kind of step waits for, and the rank on which the wait is left out.
WAITS = [
    ("receive", "allocate", 1),
    ("run", "receive", 0),
    ("run", "receive", 1),
    ("send", "run", 0),
    ("send", "run", 1),
    ("release", "send", 0),
    ("reduce", "run", 1),
    ("join", "reduce", 1),
    ("sum", "join", 0),
    ("join", "sum", 1),
]


def plan_of() -> Plan:
    return one_f_one_b(place(Costs.uniform(2, 10, 20, boundary_bytes=8), Cluster.uniform(2)), NUM_MICROBATCHES)


def tied_stages() -> Stages:
    stages = chain(2)
    stages[1].linear.weight = stages[0].linear.weight  # type: ignore[union-attr]
    return stages


def errors_with(rank: int, mutations: list[tuple[int, Callable[[], Any]]]) -> list[str]:
    """On 2 ranks of 2 replicas, for each mutation (of one rank, or BOTH) the error that the device has found, or ""."""
    mesh, found = rota.mesh(pp=2, dp=2), []
    for on, mutated in mutations:
        device = SimDevice(f"rank {rank}", goes_on=True)
        with device.active(), pipelines_on_sim([]), Pipeline(tied_stages(), plan_of(), loss_fn, mesh=mesh) as pipeline:
            mine = on in (pipeline.rank, BOTH)
            pipeline.step(*batch_of(NUM_MICROBATCHES, pipeline.replica))
            with mutated() if mine else nullcontext():
                plans = pipeline._engine.plans
                plans.base = plans._make(pipeline.plan, 0, ())
                pipeline.step(*batch_of(NUM_MICROBATCHES, pipeline.replica))
                pipeline.step(*batch_of(NUM_MICROBATCHES, pipeline.replica))
                with torch.no_grad():  # as an optimizer would
                    for parameter in pipeline.parameters():
                        parameter.sub_(0.01 * parameter.grad)
        found.append(error_of(device))
    return found


def error_of(device: Any) -> str:
    try:
        device.check()
    except AssertionError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def without_wait(what: str, before: str) -> Any:
    """The device program without the waits of one kind of step for another."""
    original = execution.device_program

    def without(*args: Any, **options: Any) -> DeviceProgram:
        program = original(*args, **options)

        def changed(step: Step) -> Step:
            if step.what != what:
                return step
            return replace(step, waits=tuple(w for w in step.waits if program.steps[w].what != before))

        steps = tuple(map(changed, program.steps))
        assert steps != program.steps, "nothing was left out"
        return replace(program, steps=steps)

    return patch.object(execution, "device_program", without)


def sent_values_are_not_held() -> Any:
    original = channels.Channels._send

    def send(self: Any, passage: Any, tensors: Any, stream: Any) -> Any:
        mark = original(self, passage, tensors, stream)
        self._sent[passage].clear()
        return mark

    return patch.object(channels.Channels, "_send", send)


def copies_for_sending_are_made_on_the_compute_stream() -> Any:
    """After the event that the send waits for."""
    original = channels.Channels._send

    def send(self: Any, passage: Any, tensors: Any, stream: Any) -> Any:
        return original(self, passage, [tensor.clone() for tensor in tensors], stream)

    return patch.object(channels.Channels, "_send", send)


def reductions_are_packed_on_the_compute_stream() -> Any:
    original = replicas.GradientAllReduce._packed

    def packed(self: Any) -> Any:
        device = current_device()
        with device.use(device.default):
            return iter([*original(self)])

    return patch.object(replicas.GradientAllReduce, "_packed", packed)


#: On both ranks.
HOLDS = (
    sent_values_are_not_held,
    copies_for_sending_are_made_on_the_compute_stream,
    reductions_are_packed_on_the_compute_stream,
)


def test_each_wait_hold_and_stream_is_needed(pool: Pool) -> None:
    """And nothing is found where nothing is left out."""
    mutations: list[tuple[str, int, Callable[[], Any]]] = [("nothing", -1, nullcontext)]
    mutations += [(f"{what} for {before}", rank, partial(without_wait, what, before)) for what, before, rank in WAITS]
    mutations += [(mutated.__name__, BOTH, mutated) for mutated in HOLDS]
    by_process = pool.run(4, errors_with, [(rank, mutated) for _, rank, mutated in mutations])
    for i, (name, rank, _) in enumerate(mutations):
        for process, errors in enumerate(by_process):
            is_its_own = rank in (process % 2, BOTH)
            assert bool(errors[i]) == is_its_own, f"{name} on rank {rank}: {errors[i]!r}"
            assert errors[i].startswith(("RaceError", "FreedTooEarlyError") if is_its_own else "")
