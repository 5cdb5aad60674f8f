"""Forward and backward, whole or split, of each stage, measured on this machine while all ranks compute at once."""

from __future__ import annotations

import copy
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from threading import BrokenBarrierError
from typing import Any

import torch

from rota.costs import Costs
from rota.errors import PipelineError
from rota.models import Stages
from rota.profiling.kept import bytes_for_weights, kept_bytes, num_bytes, static_bytes
from rota.runtime.gradients import (
    Kept,
    backward,
    backward_inputs,
    forward,
    gradient_edges,
    hand_over,
    take_loss,
    writes_in_place,
)
from rota.runtime.messages import flatten
from rota.runtime.split_backward import WeightWork

LossFn = Callable[[Any, Any], torch.Tensor]

_RUN_NS = 60_000_000  # several of the scheduler's time slices: one op alone meets none of them, or a whole one


@dataclass(frozen=True, slots=True)
class StageCosts:
    """One stage, measured; bytes by outgoing edge."""

    forward_us: int
    backward_us: int
    weight_us: int | None  # None: the backward is whole
    activation_bytes: int
    input_frees_bytes: int
    static_bytes: int
    boundary_bytes: list[int]
    gradient_bytes: list[int]


def profile(
    stages: Stages,
    batch: Any,
    target: Any = None,
    loss_fn: LossFn | None = None,
    *,
    ranks: Sequence[int] | None = None,
    split_backward: bool = False,
    repeats: int = 7,
    report: Callable[[str], None] = lambda _: None,
) -> Costs:
    """Costs of each stage for one micro-batch: `batch` and `target` as a micro-batch of the run will be.

    Every rank is a process of its own with one thread, and all of them compute at once, as in a run: where ranks
    share cores, their times say so (and `report` is told). `ranks[i]` is stage i's rank (default: rank i). F and B
    are warmed up; the median of `repeats` runs counts, each long enough for ranks that share a core to have taken
    turns. Activation bytes are those of the storages that autograd keeps, parameters and `batch` left out; static
    bytes are parameters, gradients and buffers. `split_backward` measures I and W in place of B: I takes 0 where a
    stage's inputs want no gradient, and frees what W is not seen to keep, less than nothing where W keeps more than F
    did. The caller's modules, gradients and random state are not touched. Raises PipelineError if a stage fails, with
    its number.
    """
    if not isinstance(stages, Stages):
        raise PipelineError(
            f"profile takes Stages, not a {type(stages).__name__}; use rota.split(model, num_stages) first"
        )
    if ranks is not None and len(ranks) != len(stages):
        raise PipelineError(f"ranks has {len(ranks)} entries for {len(stages)} stages; give each stage's rank")
    for stage, module in enumerate(stages.modules):
        device = next((t.device.type for t in module.state_dict().values() if t.device.type != "cpu"), None)
        if device is not None:
            raise PipelineError(f"stage {stage} is on {device}; only CPU stages can be profiled")
    on = list(range(len(stages)) if ranks is None else ranks)
    held = {rank: [s for s in range(len(stages)) if on[s] == rank] for rank in sorted(set(on))}
    cores = len(os.sched_getaffinity(0))
    sharing = f"{len(held)} ranks share {cores} cores" if len(held) > cores else f"{len(held)} ranks on {cores} cores"
    report(f"measuring {len(stages)} stages, all ranks at once ({sharing})")
    measured = _measure_at_once(list(held.values()), (stages, batch, target, loss_fn, split_backward, repeats))
    note = f"measured on CPU, 1 thread a rank; {sharing}"
    return _costs_of(stages, [measured[stage] for stage in range(len(stages))], split_backward, note)


def profile_here(
    stages: Stages,
    batch: Any,
    target: Any = None,
    loss_fn: LossFn | None = None,
    *,
    split_backward: bool = False,
    repeats: int = 7,
) -> Costs:
    """As `profile`, but in this process, one stage after another: for a process that must not be forked.

    One that has joined others must not. No rank shares a core with another meanwhile. Raises what a stage raises.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            copied = copy.deepcopy(stages)
            described = copied, batch, target, loss_fn, split_backward
            rows = [StageRound(stage, *described).costs(repeats) for stage in range(len(copied))]
    finally:
        torch.set_num_threads(num_threads)
    return _costs_of(stages, rows, split_backward, "measured on CPU, 1 thread, one stage after another")


def _costs_of(stages: Stages, rows: list[StageCosts], split_backward: bool, note: str) -> Costs:
    per_edge: dict[tuple[int, int], tuple[int, int]] = {}
    for stage, row in enumerate(rows):
        for edge, *sizes in zip(stages.outgoing(stage), row.boundary_bytes, row.gradient_bytes, strict=True):
            per_edge[edge.source, edge.target] = sizes[0], sizes[1]
    edges = [(edge.source, edge.target) for edge in stages.edges]
    return Costs(
        forward_us=tuple(row.forward_us for row in rows),
        backward_us=tuple(row.backward_us for row in rows),
        weight_us=tuple(row.weight_us or 0 for row in rows) if split_backward else None,
        input_frees_bytes=tuple(row.input_frees_bytes for row in rows) if split_backward else None,
        activation_bytes=tuple(row.activation_bytes for row in rows),
        boundary_bytes=tuple(per_edge[edge][0] for edge in edges),
        gradient_bytes=tuple(per_edge[edge][1] for edge in edges),
        static_bytes=tuple(row.static_bytes for row in rows),
        edges=tuple(edges),
        note=note,
    )


def _measure_at_once(
    held: list[list[int]], job: tuple[Stages, Any, Any, LossFn | None, bool, int]
) -> dict[int, StageCosts]:
    """A process a rank, forked so that models and loss functions need no pickling; results by stage."""
    context = multiprocessing.get_context("fork")
    barrier, still_measuring = context.Barrier(len(held)), context.Value("i", len(held))
    workers = []
    for stage_numbers in held:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(theirs, stage_numbers, job, barrier, still_measuring))
        process.start()
        theirs.close()
        workers.append((process, ours))
    results: dict[int, StageCosts] = {}
    failures = []
    try:
        for process, pipe in workers:
            try:
                answer = pipe.recv()
            except EOFError:
                process.join()
                answer = f"a profiling process ended with exit code {process.exitcode}"
            if isinstance(answer, dict):
                results |= answer
            elif answer:  # empty: this one only gave up because another had failed
                failures.append(answer)
    finally:
        for process, _ in workers:
            process.terminate()
            process.join()
    if failures:
        raise PipelineError(failures[0])
    return results


def _work(pipe: Connection, stage_numbers: list[int], job: tuple[Any, ...], barrier: Any, still_measuring: Any) -> None:
    torch.set_num_threads(1)  # as in a run; and a forked process must not use the parent's thread pool
    *described, repeats = job
    stage = -1
    try:
        rounds = []
        for stage in stage_numbers:
            rounds.append(StageRound(stage, *described))
        barrier.wait()
        costs = {}
        for stage, one in zip(stage_numbers, rounds, strict=True):
            costs[stage] = one.costs(repeats)
        with still_measuring.get_lock():
            still_measuring.value -= 1
        while still_measuring.value > 0:  # the others measure: keep the machine as busy as it will be
            for one in rounds:
                one.time_once()
        pipe.send(costs)
    except BrokenBarrierError:
        pipe.send("")
    except Exception as error:
        barrier.abort()
        with still_measuring.get_lock():
            still_measuring.value -= 1
        last = traceback.extract_tb(error.__traceback__)[-1]
        pipe.send(
            f"stage {stage} failed while profiling: {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        )


class StageRound:
    """F and B, or F, I and W, of one stage, again and again, on the inputs that it gets in a run."""

    def __init__(
        self, stage: int, stages: Stages, batch: Any, target: Any, loss_fn: LossFn | None, split: bool = False
    ) -> None:
        self.stages, self.stage, self.batch, self.target, self.loss_fn = stages, stage, batch, target, loss_fn
        self.split, self.in_place = split, writes_in_place(stages[stage])
        outputs: dict[int, Any] = {}
        for before in stages.order():
            received = [hand_over(edge.take(outputs[edge.source])) for edge in stages.incoming(before)]
            if before == stage:
                self.received = received
                break
            outputs[before] = stages.call(before, received, batch)
        values = self._forward()[0]
        crossing = values if stages.outgoing(stage) else []
        self.sizes = [num_bytes(value) for value in crossing], [num_bytes(value, True) for value in crossing]
        self.gradients = [
            [torch.randn_like(tensor) for tensor in flatten(value, "")[0] if tensor.requires_grad] for value in values
        ]
        self.inputs = [tensor for value in received for tensor in flatten(value, "")[0]]

    def _forward(self) -> tuple[list[Any], Kept]:
        leaves = [hand_over(value) for value in self.received]
        output, values, kept = forward(
            self.stages, self.stage, leaves, self.batch, split=self.split, in_place=self.in_place
        )
        if not values and self.loss_fn is not None:
            take_loss(kept, self.loss_fn, output, self.target, 1.0)
        elif not values:  # without a loss the backward starts from the last stage's output
            values = [output]
            kept.outputs = [gradient_edges(output)]
        return values, kept

    def time_once(self) -> tuple[int, int, int]:
        """ns of one forward, of one backward (B or I), and of W."""
        times = [time.perf_counter_ns()]
        kept = self._forward()[1]
        times.append(time.perf_counter_ns())
        work = backward_inputs(kept, self.gradients)[1] if self.split else backward(kept, self.gradients)
        times.append(time.perf_counter_ns())
        if isinstance(work, WeightWork):
            work.run()
        times.append(time.perf_counter_ns())
        return times[1] - times[0], times[2] - times[1], times[3] - times[2]

    def costs(self, repeats: int) -> StageCosts:
        self.time_once()
        rounds = 1 + _RUN_NS // (sum(self.time_once()) + 1)
        runs = [
            [sum(column) for column in zip(*(self.time_once() for _ in range(rounds)), strict=True)]
            for _ in range(repeats)
        ]
        forward_us, backward_us, weight_us = (
            round(median(column) / rounds / 1000) for column in zip(*runs, strict=True)
        )
        if self.split and not any(tensor.requires_grad for tensor in self.inputs):
            backward_us = 0
        module = self.stages[self.stage]
        batch = flatten(self.batch, "the batch")[0] + flatten(self.target, "the target")[0]
        fixed = [*module.parameters(), *module.buffers(), *batch]
        inputs = [] if self.split else self.inputs  # a split backward's inputs are held by those alone who saved them
        held = kept_bytes(lambda: self._forward()[1], inputs, fixed)
        waits = bytes_for_weights(backward_inputs(self._forward()[1], self.gradients)[1], fixed) if self.split else 0
        times = forward_us, backward_us, weight_us if self.split else None
        return StageCosts(*times, held, held - waits, static_bytes(module), *self.sizes)
