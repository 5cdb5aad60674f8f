"""Measures forward and backward, whole or split, of each stage on this machine, while all ranks compute at once."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from rota.core.costs import Costs
from rota.core.errors import PipelineError, error_text
from rota.core.text import count_text
from rota.models import Stages
from rota.models.carving.copies import deep_copy
from rota.models.sequence_chunks import Chunk
from rota.profiling.clocks import Clocks, Laps, Run, launch_text
from rota.profiling.devices import accelerators_of, place_name
from rota.profiling.forked import run_forked
from rota.profiling.peak_memory import peaks
from rota.profiling.stage_run import (
    Earlier,
    MakeOptimizer,
    StageRun,
    Workload,
    on_device_of,
    one_thread,
    optimizer_costs,
    state_bytes,
    static_bytes,
)
from rota.runtime.gradients.chunks import length_of
from rota.runtime.gradients.forward_backward import StageForward
from rota.runtime.losses import LossFn
from rota.runtime.messages import hand_over
from rota.runtime.microbatches import num_examples, to_chunks

_RUN_NS = 60_000_000  # several of the scheduler's time slices: a single op may meet none, or a whole one


@dataclass(frozen=True, slots=True)
class StageProfileOptions:
    """How stages are measured.

    Attributes:
        optimizer: Makes an optimizer of a list of parameters; its state and step time are included in the costs.
        repeats: Number of runs; their median counts.
        ranks: The rank of each stage; None: stage i is on rank i.
        here: Measure in this process, one stage after another, so that no rank shares a core with another: for a
            process that must not be forked, such as one in a process group. Errors of a stage are raised as they are.
        report: Called with a line of text.
    """

    optimizer: MakeOptimizer | None = None
    repeats: int = 7
    ranks: Sequence[int] | None = None
    here: bool = False
    report: Callable[[str], None] = lambda _: None


_DEFAULT = StageProfileOptions()


class _Job(NamedTuple):
    workload: Workload
    split: bool
    recompute: Collection[int]
    options: StageProfileOptions

    def rank_of(self, stage: int) -> int:
        return stage if self.options.ranks is None else self.options.ranks[stage]


@dataclass(frozen=True, slots=True)
class StageCosts:
    """One stage as measured: `times_us` and `peaks` (bytes) of F, R, B or I, and W; sizes by outgoing edge.

    `launches` is a `launch_text`.
    """

    times_us: tuple[int, ...]
    peaks: tuple[int, ...]
    spread: float
    launches: str
    activation_bytes: int
    waiting_bytes: int
    checkpoint_bytes: int
    static_bytes: int
    state_bytes: int
    optimizer_us: int
    boundary_bytes: list[int]
    gradient_bytes: list[int]


def profile(
    stages: Stages,
    batch: Any,
    target: Any = None,
    loss_fn: LossFn | None = None,
    *,
    split_backward: bool = False,
    recompute: Collection[int] = (),
    options: StageProfileOptions = _DEFAULT,
) -> Costs:
    """Measure the costs of each stage for one micro-batch.

    Every rank is a process of its own with one thread, and all compute at once, as in a run: ranks that share cores
    are slower. After a warm-up, the median run counts; each is long enough for ranks that share a core to take turns.
    Stages on accelerators are measured in this process, one after another: by events on the device, while the host is
    ahead of it. The caller's modules, gradients and random state are not touched.

    Args:
        stages: The stages, on the CPU or on accelerators.
        batch: Inputs of one micro-batch, as in the run.
        target: Its targets.
        loss_fn: Computes the loss of the last stage's output and the target; None: the backward begins at the output.
        split_backward: Whether to measure I and W instead of B. I costs 0 µs if a stage's inputs need no gradient. It
            frees the bytes that W does not keep: a negative number if W keeps more than F did.
        recompute: The stages to measure with R.
        options: How to measure.

    Returns:
        Times in µs and their spread, and bytes per stage. Activation bytes are those of storages that are alive between
        F and B, without parameters and `batch`; static bytes are parameters, gradients, buffers and the optimizer's
        state.

    Raises:
        PipelineError: If a stage fails, with its number.
    """
    _require(stages, options.ranks, recompute)
    job = _Job(Workload(stages, batch, target, loss_fn), split_backward, recompute, options)
    if options.here or accelerators_of(stages):
        options.report(f"measuring {count_text(len(stages), 'stage')} on {place_name(stages)}, one after another")
        return _measured_here(job)
    held: dict[int, list[int]] = {}
    for stage in range(len(stages)):
        held.setdefault(job.rank_of(stage), []).append(stage)
    cores = len(os.sched_getaffinity(0))
    on_cores = f"{'share' if len(held) > cores else 'on'} {count_text(cores, 'core')}"
    sharing = f"{count_text(len(held), 'rank')} {on_cores}"
    options.report(f"measuring {count_text(len(stages), 'stage')}, all ranks at once ({sharing})")
    measured = _measure_at_once([held[rank] for rank in sorted(held)], job)
    rows = [measured[stage] for stage in range(len(stages))]
    return _costs_of(job, rows, f"measured on CPU, 1 thread per rank; {sharing}")


def profile_chunks(
    stages: Stages,
    batch: Any,
    target: Any = None,
    loss_fn: LossFn | None = None,
    *,
    num_chunks: int,
    split_backward: bool = False,
    repeats: int = 7,
) -> tuple[Costs, ...]:
    """Measure the costs of each chunk of a sample, in this process, one stage after another.

    Later chunks cost more, as they read more keys and values. Activation bytes of a chunk include its keys and values
    and, except for the last one, their gradients, which the backwards of later chunks add up.

    Args:
        stages: The stages.
        batch: Inputs of one whole sample, or several rows of one length.
        target: Its targets.
        loss_fn: As for `profile`.
        num_chunks: Chunks to cut it into along dimension 1.
        split_backward: As for `profile`.
        repeats: Number of runs; their median counts.

    Returns:
        [num_chunks]: the costs of each. Place them, and join the placements with `Placement.of_classes`.

    Raises:
        PipelineError: The batch cannot be cut, or the stages are not on this machine.
    """
    _require(stages, None, ())
    sample = (0,) * num_chunks
    batches, targets = to_chunks("batch", batch, sample).values, to_chunks("target", target, sample).values
    costs = []
    for c in range(num_chunks):
        chunk = Workload(stages, batches[c], targets[c], loss_fn, tuple(batches[:c]), c + 1 < num_chunks)
        costs.append(_measured_here(_Job(chunk, split_backward, (), StageProfileOptions(repeats=repeats))))
    return tuple(costs)


def _measured_here(job: _Job) -> Costs:
    stages = job.workload.stages
    with one_thread(stages):
        copied = job._replace(workload=job.workload._replace(stages=deep_copy(stages)))
        clocks = Clocks()
        rows = [_costs(_run_of(copied, stage), copied, clocks) for stage in range(len(stages))]
    where = place_name(stages) if accelerators_of(stages) else "CPU, 1 thread"
    bound = {str(stage): row.launches for stage, row in enumerate(rows) if row.launches}
    for stage, launches in bound.items():
        job.options.report(f"stage {stage} is bound by its launches: {launches}")
    note = f"; bound by launches: stage {', '.join(bound)}" if bound else ""
    return _costs_of(job, rows, f"measured on {where}, one stage after another{note}")


def _require(stages: Stages, ranks: Sequence[int] | None, recompute: Collection[int]) -> None:
    if not isinstance(stages, Stages):
        raise PipelineError(
            f"profile needs Stages, not a {type(stages).__name__}; use rota.split(model, num_stages) first"
        )
    if ranks is not None and len(ranks) != len(stages):
        raise PipelineError(f"ranks has {len(ranks)} entries for {len(stages)} stages; give each stage's rank")
    for stage in recompute:
        if stage not in range(len(stages)):
            raise PipelineError(f"recompute has stage {stage!r}, but there are stages 0 to {len(stages) - 1}")
    for stage, module in enumerate(stages.modules):
        if any(tensor.is_meta for tensor in module.state_dict().values()):
            raise PipelineError(
                f"stage {stage} is on meta; only stages whose tensors have memory can be measured. Estimate with "
                f"profile_layers(model, …, device=…)"
            )


def _costs_of(job: _Job, rows: list[StageCosts], note: str) -> Costs:
    stages, split = job.workload.stages, job.split
    sizes = {
        edge: size
        for stage, row in enumerate(rows)
        for edge, *size in zip(stages.outgoing(stage), row.boundary_bytes, row.gradient_bytes, strict=True)
    }
    forward, again, backward, weight = zip(*(row.times_us for row in rows), strict=True)
    peaks = [*zip(*(row.peaks for row in rows), strict=True)]
    costs = Costs(
        forward_us=forward,
        backward_us=backward,
        weight_us=weight if split else None,
        input_frees_bytes=tuple(row.activation_bytes - row.waiting_bytes for row in rows) if split else None,
        activation_bytes=tuple(row.activation_bytes for row in rows),
        boundary_bytes=tuple(sizes[edge][0] for edge in stages.edges),
        gradient_bytes=tuple(sizes[edge][1] for edge in stages.edges),
        forward_peak_bytes=tuple(map(max, peaks[0], peaks[1])),  # R has no column of its own
        backward_peak_bytes=peaks[2],
        weight_peak_bytes=peaks[3],
        static_bytes=tuple(row.static_bytes for row in rows),
        state_bytes=tuple(row.state_bytes for row in rows),
        optimizer_us=tuple(row.optimizer_us for row in rows),
        recompute_us=tuple(us if s in job.recompute else None for s, us in enumerate(again)) if job.recompute else None,
        checkpoint_bytes=tuple(row.checkpoint_bytes for row in rows),
        edges=tuple(edge[:2] for edge in stages.edges),
        note=note,
        microbatch_rows=num_examples(job.workload.batch) or None,
        spread_us=tuple(round(row.spread * sum(row.times_us)) for row in rows),
    )
    repeats = f"interquartile range of {job.options.repeats} repeats"
    job.options.report(f"F and B of a stage vary by {costs.spread:.0%} at most ({repeats})")
    return costs


def _measure_at_once(held: list[list[int]], job: _Job) -> dict[int, StageCosts]:
    """One process per rank; results by stage. The first one that fails, or is killed, ends all."""
    context = multiprocessing.get_context("fork")
    barrier, still_measuring = context.Barrier(len(held)), context.Value("i", len(held))
    results: dict[int, StageCosts] = {}
    for of_rank in run_forked(len(held), lambda number: _work(held[number], job, barrier, still_measuring)):
        results |= {int(stage): StageCosts(**fields) for stage, fields in of_rank.items()}
    return results


def _work(stage_numbers: list[int], job: _Job, barrier: Any, still_measuring: Any) -> dict[int, dict[str, Any]]:
    stage = -1
    try:
        runs = []
        for stage in stage_numbers:
            runs.append(_run_of(job, stage))
        barrier.wait()
        costs = {}
        for stage, stage_run in zip(stage_numbers, runs, strict=True):
            costs[stage] = asdict(_costs(stage_run, job, Clocks()))
        with still_measuring.get_lock():
            still_measuring.value -= 1
        while still_measuring.value > 0:  # the others measure: keep the machine as busy as in a run
            for stage_run in runs:
                stage_run.run(lambda: None)
    except Exception as error:
        failed, last = _failed_stage(error, stage), traceback.extract_tb(error.__traceback__)[-1]
        where = f"({last.filename}:{last.lineno})"
        raise PipelineError(f"stage {failed} failed while profiling: {error_text(error)} {where}") from error
    return costs


def _failed_stage(error: Exception, stage: int) -> int:
    """The stage that failed while `stage` was measured: perhaps one before it, which made what it receives."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code is _received.__code__]
    return frames[-1].f_locals["before"] if frames else stage


def _run_of(job: _Job, stage: int) -> StageRun:
    """The stage, with the values that the stages before it send to it, on its device."""
    read: dict[int, Earlier] = {}
    for batch in job.workload.earlier or ():
        _received(job.workload._replace(batch=batch), -1, read)
    workload, received = _received(job.workload, stage, read)
    earlier = read.get(stage, Earlier(0, [])) if workload.earlier is not None else None
    return StageRun(workload, stage, received, split=job.split, recompute=stage in job.recompute, earlier=earlier)


def _received(of_all: Workload, stage: int, read: dict[int, Earlier]) -> tuple[Workload, list[Any]]:
    """What a stage gets, after all stages before it have run; -1: all run. `read`: by stage, where there are chunks."""
    stages, outputs = of_all.stages, dict[int, Any]()
    workload, received = of_all, list[Any]()
    for before in stages.order():
        workload, move = on_device_of(before, of_all)
        received = [hand_over(move(edge.take(outputs[edge.source]))) for edge in stages.incoming(before)]
        if before == stage:
            break
        # With split=True, as a stage may then write into its inputs.
        start, passed_on = read.get(before, Earlier(0, []))
        chunk = None if of_all.earlier is None else Chunk(start, passed_on)
        outputs[before] = hand_over(StageForward(stages, before, split=True)(received, workload.batch, chunk=chunk)[0])
        if chunk is not None and stage < 0:
            length = length_of((*received, *stages.pick_inputs(before, workload.batch)), f"stage {before}")
            read[before] = Earlier(start + length, [*passed_on, hand_over(chunk.passed_on())])
    return workload, received


def _costs(stage_run: StageRun, job: _Job, clocks: Clocks) -> StageCosts:
    stages, stage, clock = job.workload.stages, stage_run.stage, clocks.on(stage_run.device)

    def measure(run: Run) -> Laps:
        return clock.timed(run, job.options.repeats, _RUN_NS, together=True)

    laps = measure(stage_run.run)
    f_us, r_us, b_us, w_us = laps.us
    if job.split and not stage_run.wants_input_gradients:
        b_us = 0.0
    held = stage_run.bytes([job.rank_of(edge.source) == job.rank_of(stage) for edge in stages.incoming(stage)])
    part_peaks = peaks(stage_run.run, stage_run.device)
    module = stages[stage]
    state, step_us = optimizer_costs(module, job.options.optimizer, measure)
    return StageCosts(
        tuple(map(round, (f_us, r_us, b_us, w_us))),
        tuple(part_peaks),
        laps.spread,
        launch_text("FRIW" if job.split else "FRBW", laps),
        max(held.kept, held.checkpoint),  # of a stage that saves less than it receives
        held.waiting,
        held.checkpoint,
        static_bytes(module) + sum(state),
        state_bytes(module) + sum(state),
        round(step_us),
        *stage_run.sizes,
    )
