"""Runs of PyTorch's own schedules, traced by torch.profiler: imported as what ran, and explained."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.profiler import ProfilerActivity, profile

from rota import Cause, FormatError, Kind, Timeline, explain, schedules
from rota.interop import import_traces
from support.pool import Pool

RANKS, MICROBATCHES, STEPS = 4, 8, 2


def traced(rank: int, folder: Path) -> dict[str, list[list[str]]]:
    """Two profiled steps of each schedule; the own orders of ops of those with several stages per rank."""
    torch.manual_seed(rank)
    _trace(_single(Schedule1F1B, rank), rank, folder / f"stacks{rank}.json", with_stack=True)
    _trace(_single(ScheduleGPipe, rank), rank, folder / f"gpipe{rank}.json")
    orders = {}
    for name, several, mine in (
        ("interleaved", ScheduleInterleaved1F1B, (rank, rank + RANKS)),
        ("zb_v", ScheduleZBVZeroBubble, (rank, 2 * RANKS - 1 - rank)),
    ):
        schedule = several([_stage(i, 2 * RANKS) for i in mine], MICROBATCHES, loss_fn=nn.functional.mse_loss)
        _trace(schedule, rank, folder / f"{name}{rank}.json.gz")
        orders[name] = [[str(action) for action in order if action] for order in schedule.pipeline_order.values()]
    return orders


def _stage(index: int, count: int) -> PipelineStage:
    return PipelineStage(nn.Sequential(nn.Linear(16, 16), nn.ReLU()), index, count, torch.device("cpu"))


def _single(schedule: Any, rank: int) -> Any:
    return schedule(_stage(rank, RANKS), MICROBATCHES, loss_fn=nn.functional.mse_loss)


def _trace(schedule: Any, rank: int, path: Path, with_stack: bool = False) -> None:
    stages = [schedule._stage] if hasattr(schedule, "_stage") else schedule._stages
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.submod.parameters()], lr=0.1)
    batch, is_last = torch.randn(4 * MICROBATCHES, 16), any(stage.is_last for stage in stages)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], with_stack=with_stack) as profiler:
        for _ in range(STEPS):
            schedule.step(*((batch,) if rank == 0 else ()), target=batch if is_last else None)
            optimizer.step()
            optimizer.zero_grad()
    profiler.export_chrome_trace(str(path))


def assert_explained(timeline: Timeline) -> None:
    explanation = explain(timeline, timeline.plan)
    by_rank = [sum(of_rank.values()) for of_rank in explanation.by_rank]
    assert by_rank == list(timeline.idle_us)
    assert "What would help" in explanation.to_text()
    assert {Cause.WARM_UP, Cause.DRAIN} & set(explanation.by_cause)


def test_pytorchs_own_schedules_are_imported_and_explained(pool: Pool, tmp_path: Path) -> None:
    orders = pool.run(RANKS, traced, tmp_path)[0]
    for kind in ("stacks", "gpipe", *orders):
        suffix = ".json.gz" if kind in orders else ".json"
        paths = [str(tmp_path / f"{kind}{rank}{suffix}") for rank in (2, 0, 3, 1)]
        steps = [import_traces(paths, step) for step in range(STEPS)]
        assert steps[-1] == import_traces(paths)
        for imported in steps:
            timeline = imported.timeline
            assert (imported.num_steps, timeline.plan.num_microbatches) == (STEPS, MICROBATCHES)
            assert "clocks" in imported.to_text()
            assert Timeline.from_json(timeline.to_json()) == timeline
            assert len([span for span in timeline.step_end_spans() if span.work.what == "optimizer"]) == RANKS
            assert_explained(timeline)
        assert steps[0].timeline != steps[1].timeline
        if kind in orders:
            assert [list(map(str, order)) for order in timeline.plan.orders] == orders[kind]
            assert any(span.work.what == "reduce" for span in timeline.step_end_spans())
            # PyTorch's first stage needs no gradient of its input, and does all of its backward in W.
            idle = [span for span in timeline.op_spans() if (span.work.stage, span.work.kind) == (0, Kind.I)]
            assert [span.duration_us for span in idle] == ([0] * MICROBATCHES if kind == "zb_v" else [])
        else:
            name = schedules.gpipe if kind == "gpipe" else schedules.one_f_one_b
            assert timeline.plan.orders == name(timeline.plan.placement, MICROBATCHES).orders

    bare = []
    for rank in range(RANKS):
        document = json.loads((tmp_path / f"stacks{rank}.json").read_text())
        document["traceEvents"] = [e for e in document["traceEvents"] if e.get("cat") != "python_function"]
        bare.append(tmp_path / f"bare{rank}.json")
        bare[-1].write_text(json.dumps(document))
    with pytest.raises(FormatError, match=r"bare0.json: no action .*with_stack=True"):
        import_traces([str(path) for path in bare])
