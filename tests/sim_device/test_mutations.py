"""Each mutation of `StreamDevice`, and each of what the runtime does with it, is seen by the test beside it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import pytest
import torch

from rota import Pipeline, torch_internals
from rota.core.programs import device_steps
from rota.core.programs.device_steps import COMPUTE, DeviceProgram, Step
from rota.runtime import channels
from rota.runtime.checkpoints import tensors
from rota.runtime.device.streams import StreamDevice
from rota.runtime.reducing import replicas
from sim_device.test_pipeline import (
    test_a_reduction_is_a_few_kernels_whatever_the_number_of_parameters as few_kernels,
    test_dropout_is_the_same_in_schedules_that_draw_in_different_orders as other_orders,
    test_replicas_that_accumulate as replicas_accumulate,
    test_values_that_are_not_contiguous as not_contiguous,
    test_what_a_failed_rank_leaves_on_its_device_is_aborted as failed_rank,
)
from sim_device.test_placing import (
    test_a_training_goes_on_with_another_plan_on_devices_and_on_cpus as goes_on,
)
from sim_device.test_stream_device import (
    test_both_generators_are_seeded_and_restored as generators,
    test_marks_are_on_the_hosts_clock as hosts_clock,
    test_numbers_go_and_come_without_a_wait as numbers,
    test_ops_run_on_the_stream_that_is_current_at_the_beginning_of_a_step as current,
    test_streams_run_beside_each_other_and_wait_for_events as beside,
    test_the_host_waits_for_all_streams as all_streams,
    test_the_peak_counts_from_its_reset as peak,
)
from support.pool import Pool
from support.sim_device import SimDevice
from support.sim_device.groups import SIM, SimGroup
from support.sim_device.pool import SimPool, everywhere

pytestmark = pytest.mark.dist

Mutation: TypeAlias = Callable[[], AbstractContextManager[object]]


def nothing(*_: Any) -> None:
    pass


# --- StreamDevice -----------------------------------------------------------------------------------------------------


def mark_that_is_spare(device: StreamDevice, stream: torch.Stream) -> torch.Event:
    event = mark_on(device, stream)
    device._spare.append(event)
    return event


def mark_on_current(device: StreamDevice, stream: torch.Stream) -> torch.Event:
    return mark_on(device, torch.accelerator.current_stream(SIM))


def begin_on_first_stream(device: StreamDevice) -> None:
    first = device._streams.get(COMPUTE)
    begin(device)
    device._streams[COMPUTE] = first or device._streams[COMPUTE]


def read_at_once(device: StreamDevice, tensor: torch.Tensor) -> Callable[[], list[float]]:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True).tolist


def times_at_once(device: StreamDevice, marks: list[torch.Event]) -> list[int]:
    return [round(device._begun.elapsed_time(mark) * 1e6) for mark in marks]


begin, mark_on = StreamDevice.begin, StreamDevice.mark_on

#: The method and what is there instead; which test kills it, and with which words.
OF_DEVICE: dict[str, tuple[str, Callable[..., Any], Callable[..., None], str]] = {
    "a wait does nothing": ("wait", nothing, not_contiguous, "RaceError"),
    "events are not recorded": ("record", lambda *_: torch.Event(SIM), beside, "no event orders it"),
    "all streams are that of ops": ("stream", lambda device, _: device._streams[COMPUTE], beside, "=="),
    "a stream is not used": ("use", lambda *_: nullcontext(), beside, "=="),
    "marks are on the current stream": ("mark_on", mark_on_current, not_contiguous, "RaceError"),
    "marks are made again before they are read": ("mark_on", mark_that_is_spare, hosts_clock, "=="),
    "ops stay on the first step's stream": ("begin", begin_on_first_stream, current, "=="),
    "all is done": ("is_done", lambda *_: True, all_streams, "assert not True"),
    "memory is not kept": ("keep_for", nothing, few_kernels, "FreedTooEarlyError"),
    "the host does not wait for all": ("synchronize", nothing, all_streams, "is_done"),
    "numbers are read without waiting": ("read", read_at_once, not_contiguous, "(sum, count)"),
    "numbers come from pageable memory": ("numbers", lambda _, n: torch.tensor(n).to(SIM), numbers, "aten::copy_"),
    "a number is not copied": ("number", lambda _, tensor: tensor.reshape(()), numbers, "=="),
    "the device is not seeded": ("seed", lambda _, seed: torch.default_generator.manual_seed(seed), other_orders, "<"),
    "random states are not restored": ("set_random_state", nothing, generators, "=="),
    "times are asked for too early": ("times_ns", times_at_once, hosts_clock, "must be completed"),
    "the peak is not reset": ("reset_peak", nothing, peak, "=="),
}


# --- the runtime ------------------------------------------------------------------------------------------------------


def sending(
    changed: Callable[[list[Any]], list[Any]] = list, kept: Callable[[list[Any], int], list[Any]] = lambda held, _: held
) -> AbstractContextManager[object]:
    """`changed`: the values that are sent; `kept`: what is left of those held, which contiguous copies follow."""
    send = channels.Channels._send

    def mutated(self: Any, passage: Any, values: list[Any], stream: Any) -> Any:
        with self._device.stream(COMPUTE):  # as it would be outside of the stream of the send
            values = changed(values)
        mark = send(self, passage, values, stream)
        self._sent[passage] = kept(self._sent[passage], len(values))
        return mark

    return patch.object(channels.Channels, "_send", mutated)


def cloned(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """After the event that the send waits for."""
    return [value.clone() for value in values]


def packing_on_the_stream_of_ops() -> AbstractContextManager[object]:
    packed, ops = replicas.GradientAllReduce._packed, torch.accelerator.current_stream(SIM)

    def mutated(self: Any) -> Any:
        with ops:
            return iter([*packed(self)])

    return patch.object(replicas.GradientAllReduce, "_packed", mutated)


def moving_asynchronously() -> AbstractContextManager[object]:
    def mutated(backend: Any, tensor: torch.Tensor, options: Any) -> None:
        options.asyncOp = True
        backend.broadcast([tensor], options)

    return everywhere(torch_internals.move_message, mutated)


def opening_nothing(collective: str) -> AbstractContextManager[object]:
    init = Pipeline.__init__

    def mutated(self: Any, *args: Any, **options: Any) -> None:
        with patch.object(SimGroup, collective, nothing):
            init(self, *args, **options)

    return patch.object(Pipeline, "__init__", mutated)


def checkpoints_at_once() -> AbstractContextManager[object]:
    copied = tensors.copied
    return everywhere(copied, lambda *args: (copied(*args)[0], nothing))


OF_RUNTIME: dict[str, tuple[Mutation, Callable[..., None], str]] = {
    "sent values are not held": (lambda: sending(kept=lambda *_: []), not_contiguous, "FreedTooEarlyError"),
    "only copies are held": (lambda: sending(kept=lambda held, num: held[num:]), not_contiguous, "FreedTooEarlyError"),
    "values are copied on the stream of ops": (lambda: sending(cloned), not_contiguous, "RaceError"),
    "gradients are packed on the stream of ops": (packing_on_the_stream_of_ops, replicas_accumulate, "RaceError"),
    "messages are asynchronous": (moving_asynchronously, not_contiguous, "FreedTooEarlyError"),
    "nothing is aborted": (lambda: patch.object(SimGroup, "abort", nothing), failed_rank, "assert not True"),
    "channels are not opened": (lambda: opening_nothing("broadcast"), not_contiguous, "opening a communicator"),
    "groups are not opened": (lambda: opening_nothing("allreduce"), not_contiguous, "opening a communicator"),
    "checkpoints do not wait for copies": (checkpoints_at_once, goes_on, "nan"),
}


# --- the device program's waits ---------------------------------------------------------------------------------------


def waiting_for_less(what: str, before: str, rank: int) -> AbstractContextManager[object]:
    """Without the waits of one kind of step for another, on one rank."""
    device_program = device_steps.device_program

    def mutated(timeline: Any, of_rank: Any, **options: Any) -> DeviceProgram:
        program = device_program(timeline, of_rank, **options)
        if of_rank.rank != rank:
            return program

        def without(step: Step) -> Step:
            waits = (wait for wait in step.waits if step.what != what or program.steps[wait].what != before)
            return replace(step, waits=tuple(waits))

        return replace(program, steps=tuple(map(without, program.steps)))

    return everywhere(device_program, mutated)


#: What waits for what, on which rank, and the test that needs it.
WAITS: dict[str, tuple[Mutation, Callable[..., None], str]] = {
    f"{what} on rank {rank} does not wait for {before}": (partial(waiting_for_less, what, before, rank), test, words)
    for what, before, rank, test, words in (
        ("receive", "allocate", 1, not_contiguous, "RaceError"),
        ("run", "receive", 0, not_contiguous, "RaceError"),
        ("run", "receive", 1, not_contiguous, "RaceError"),
        ("send", "run", 0, not_contiguous, "RaceError"),
        ("send", "run", 1, not_contiguous, "RaceError"),
        ("release", "send", 0, not_contiguous, "FreedTooEarlyError"),
        ("reduce", "run", 1, replicas_accumulate, "RaceError"),
        ("join", "reduce", 1, replicas_accumulate, "RaceError"),
        ("sum", "join", 0, replicas_accumulate, "RaceError"),
        ("join", "sum", 1, replicas_accumulate, "RaceError"),
    )
}


# --- all -----------------------------------------------------------------------------------------------


def mutation(name: str) -> AbstractContextManager[object]:
    if name not in OF_DEVICE:
        return (OF_RUNTIME | WAITS)[name][0]()
    method, mutated, *_ = OF_DEVICE[name]
    return patch.object(StreamDevice, method, mutated)


def mutated(rank: int, name: str, function: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    try:
        with mutation(name), patch.object(SimDevice, "goes_on", new=True):
            return function(rank, *args), ""
    except Exception as error:
        return None, repr(error)


class MutatedPool:
    """`run` as of `Pool`, which stays as it is if all ranks go on to the end."""

    def __init__(self, pool: Pool, name: str) -> None:
        self._pool, self._name = pool, name

    def run(self, num_ranks: int, function: Callable[..., Any], *args: Any, **limit: float) -> list[Any]:
        by_rank = self._pool.run(num_ranks, mutated, self._name, function, *args, **limit)
        if errors := [error for _, error in by_rank if error]:
            raise AssertionError(errors)
        return [result for result, _ in by_rank]


@pytest.mark.parametrize("name", [*OF_DEVICE, *OF_RUNTIME, *WAITS])
def test_killed(name: str, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, test, words = (OF_DEVICE | OF_RUNTIME | WAITS)[name]
    mutated_pool, needs = MutatedPool(pool, name), signature(test).parameters
    fixtures: dict[str, Any] = {"tmp_path": tmp_path, "monkeypatch": monkeypatch, "pp": 2, "dp": 2}
    fixtures |= {"pool": mutated_pool, "sim_pool": SimPool(mutated_pool)}

    def run() -> None:
        with SimDevice().checked() as fixtures["device"], nullcontext() if "pool" in str(needs) else mutation(name):
            test(**{need: fixtures[need] for need in needs})

    with pytest.raises((AssertionError, RuntimeError)) as error:
        run()
    assert words in str(error.value)
