"""Traces written from timelines that are known: what is read from them is what was written, or a refusal."""

import gzip
import json
import random
from dataclasses import replace
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

from rota import Cause, Cluster, Costs, FormatError, Kind, Plan, Timeline, Transfer, explain, place, schedules
from rota.core.errors import RotaError
from rota.interop import import_traces
from rota.interop.traces import trace_files
from support.measured import measured_like
from support.pool import Pool
from support.trace_files import event, written


def chain_timeline(seed: int, split: bool = False) -> Timeline:
    """Measured-like, of a chain whose ops and transfers all take time, from its first op on."""
    costs = Costs.uniform(3, weight_us=1 if split else None, activation_bytes=0)
    make = schedules.zb_h1 if split else schedules.one_f_one_b
    plan = make(place(costs, Cluster.uniform(3)), 5)
    chooser = random.Random(seed)
    while True:
        timeline = measured_like(plan, chooser, longest_us=300)
        spans = [*timeline.op_spans(), *timeline.transfer_spans()]
        if all(span.duration_us for span in spans) and timeline.starts_us[0][0] == 0:
            return timeline


def columns(timeline: Timeline) -> tuple[object, ...]:
    return timeline.plan.orders, timeline.starts_us, timeline.ends_us, timeline.arrived_us


@pytest.mark.parametrize("split", [False, True])
def test_what_was_written_is_read(split: bool, tmp_path: Path) -> None:
    for seed in range(10):
        timeline = chain_timeline(seed, split)
        imported = import_traces(written(tmp_path, timeline, [0, 0, 0]))
        assert columns(imported.timeline) == columns(timeline)
        assert imported.clock_shifts_us == (0, 0, 0)


def test_processes_without_a_trace_are_told(tmp_path: Path) -> None:
    paths = written(tmp_path, chain_timeline(1), [0, 0, 0])
    assert "processes" not in import_traces(paths).to_text()
    assert "of 3 processes, 1 gave traces" in import_traces(paths[:1]).to_text()


@pytest.mark.parametrize(
    ("hosts", "on_accelerator", "num_cores", "asked"),
    [
        (["here"] * 3, False, None, True),
        (["here"] * 3, False, 2, False),
        (["here"] * 3, True, None, False),
        (["here", "here", "there"], False, None, False),
    ],
)
def test_unknown_cores_of_one_machine_are_asked_for(
    hosts: list[str], on_accelerator: bool, num_cores: int | None, asked: bool, tmp_path: Path
) -> None:
    paths = written(tmp_path, chain_timeline(1), [0, 0, 0], on_accelerator)
    for path, host in zip(paths, hosts, strict=True):
        Path(path).write_text(json.dumps({**json.loads(Path(path).read_text()), "host_name": host}))
    imported = import_traces(paths, num_cores=num_cores)
    assert ("--cores N" in imported.to_text()) == asked
    assert imported.timeline.num_cores == num_cores


def test_on_an_accelerator_the_kernels_count(tmp_path: Path) -> None:
    timeline = chain_timeline(1)
    imported = import_traces(written(tmp_path, timeline, [0, 0, 0], on_accelerator=True))
    assert columns(imported.timeline) == columns(timeline)


@pytest.mark.parametrize("on_accelerator", [False, True])
def test_the_wait_of_an_op_that_computes_nothing_is_no_part_of_it(on_accelerator: bool, tmp_path: Path) -> None:
    """PyTorch's first stage computes nothing in I, but waits for its gradients there."""
    for seed in range(5):
        timeline = chain_timeline(seed, split=True)
        arrived = {span.work.target: span.end_us for span in timeline.transfer_spans()}  # type: ignore[union-attr]
        starts, ends, free = [*timeline.starts_us[0]], [*timeline.ends_us[0]], 0
        for i, op in enumerate(timeline.plan.orders[0]):
            if op.kind is Kind.I:
                starts[i] = ends[i] = max(free, arrived[op])
            free = ends[i]
        timeline = replace(
            timeline, starts_us=(tuple(starts), *timeline.starts_us[1:]), ends_us=(tuple(ends), *timeline.ends_us[1:])
        )
        imported = import_traces(written(tmp_path, timeline, [0, 0, 0], on_accelerator))
        assert columns(imported.timeline) == columns(timeline)
        assert imported.clock_shifts_us == (0, 0, 0)


def test_a_kernel_beside_a_receive_does_not_begin_the_op(tmp_path: Path) -> None:
    """Such as FSDP's copies, on a stream of their own."""
    timeline = chain_timeline(1)
    paths = written(tmp_path, timeline, [0, 0, 0], on_accelerator=True)
    document = json.loads(Path(paths[1]).read_text())
    events = document["traceEvents"]
    (launch,) = (one for one in events if one["name"] == "PP:1F0")
    (received,) = (one for one in events if one.get("args") == {"correlation": "r0"} and one["cat"] == "kernel")
    end = received["ts"] + received["dur"]
    events.append(event("cuda_runtime", "cudaLaunchKernel", launch["ts"] + 0.3, launch["ts"] + 0.4, correlation="copy"))
    events.append(event("kernel", "split_with_sizes_copy", end - 500, end - 400, correlation="copy"))
    Path(paths[1]).write_text(json.dumps(document))
    imported = import_traces(paths).timeline
    assert imported.starts_us[1][0] == imported.arrived_us[0][0]
    assert imported.ends_us == timeline.ends_us


def test_clocks_are_moved_until_no_message_is_early_and_no_further(tmp_path: Path) -> None:
    timeline = chain_timeline(2)
    imported = import_traces(written(tmp_path, timeline, [0, -5000, 0]))
    (zero, moved, more) = imported.clock_shifts_us
    assert zero == more == 0
    assert 5000 - 600 <= moved <= 5000
    assert "moved ahead, as messages arrived before they were sent: rank 1 by" in imported.to_text()
    sent, arrived = imported.timeline.sent_us, imported.timeline.arrived_us
    assert all(a <= b for s, e in zip(sent, arrived, strict=True) for a, b in zip(s, e, strict=True))
    started = dict(zip(timeline.plan.orders[1], imported.timeline.starts_us[1], strict=True))
    fastest = min(
        started[span.work.target] - span.start_us
        for span in imported.timeline.transfer_spans()
        if isinstance(span.work, Transfer) and span.work.receiver == 1
    )
    assert fastest == 0


def test_whole_and_split_backwards_in_one_step_are_split(tmp_path: Path) -> None:
    timeline = chain_timeline(3, split=True)
    paths = written(tmp_path, timeline, [0, 0, 0])
    document = json.loads(Path(paths[2]).read_text())
    last = [op for op in timeline.plan.orders[2] if op.kind is not Kind.F][-1]
    events = [one for one in document["traceEvents"] if one["name"] not in (f"PP:{last}",)]
    assert last.kind is Kind.W
    for one in events:
        if one["name"] == f"PP:2I{last.microbatch}":
            one["name"] = f"PP:2B{last.microbatch}"
    Path(paths[2]).write_text(json.dumps({**document, "traceEvents": events}))
    plan = import_traces(paths).timeline.plan
    assert sorted(map(str, plan.orders[2])) == sorted(map(str, timeline.plan.orders[2]))


def test_a_forward_and_a_backward_in_one_range_are_told_apart(tmp_path: Path) -> None:
    """DualPipeV's: the backward begins with the first operator of autograd."""
    names = [("user_annotation", "PP:0F0", 0, 10), ("user_annotation", "PP:(0F1;0B0)OVERLAP_F_B", 10, 50)]
    names += [("cpu_op", "aten::mm", 12, 20), ("cpu_op", "autograd::engine::evaluate_function: Mm", 24, 48)]
    names += [("cpu_op", "aten::mm", 0, 10), ("user_annotation", "PP:0B1", 50, 70), ("cpu_op", "aten::mm", 50, 70)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [event(*name) for name in names]}))
    timeline = import_traces([str(path)]).timeline
    assert list(map(str, timeline.plan.orders[0])) == ["0F0", "0F1", "0B0", "0B1"]
    assert (timeline.starts_us, timeline.ends_us) == (((0, 12, 24, 50),), ((10, 20, 48, 70),))


def trace(**fields: object) -> str:
    return json.dumps({"traceEvents": [event("user_annotation", "PP:0F0", 0, 5)], **fields})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not JSON: Expecting value at line 1, column 1"),
        ("[]", "no list of traceEvents"),
        (trace(traceEvents=[7]), "traceEvents[0] is not an object"),
        (trace(traceEvents=[]), "no action of PyTorch's pipeline engine is named in it"),
        (trace(traceEvents=[{**event("cpu_op", "x", 0, 1), "ts": "0"}]), "traceEvents[0] needs a name, and ts and dur"),
        (trace(distributedInfo={"rank": -1}), "baseTimeNanoseconds or distributedInfo.rank is not a whole number"),
        (trace(traceEvents=[event("user_annotation", "PP:1F0", 0, 5)]), "no trace runs stage 0, but one runs stage 1"),
        (trace(traceEvents=[event("user_annotation", "PP:0F3", 0, 5)]), "rank 0 never does 0F0 and 2 more"),
        (trace(traceEvents=[event("user_annotation", "PP:(0F1;0B0)OVERLAP_F_B", 0, 5)]), "distinguished"),
    ],
)
def test_what_is_wrong_is_told_with_the_file(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(RotaError) as caught:
        import_traces([str(path)])
    assert told in str(caught.value)
    assert "trace.json" in str(caught.value) or "stage" in str(caught.value) or "rank 0" in str(caught.value)


def test_traces_that_do_not_belong_together_are_told(tmp_path: Path) -> None:
    paths = written(tmp_path, chain_timeline(4), [0, 0, 0])
    with pytest.raises(FormatError, match="no traces: give one per rank"):
        import_traces([])
    with pytest.raises(FormatError, match=r"rank0.json and .*rank0.json are both of rank 0"):
        import_traces([paths[0], paths[0]])
    with pytest.raises(FormatError, match="no trace runs stage 1, but one runs stage 2"):
        import_traces([paths[0], paths[2]])
    with pytest.raises(FormatError, match="step 1 is not in the traces, which have the steps 0 to 0"):
        import_traces(paths, step=1)
    document = json.loads(Path(paths[1]).read_text())
    later = [{**one, "ts": one["ts"] + 10**6} for one in document["traceEvents"]]
    Path(paths[1]).write_text(json.dumps({**document, "traceEvents": [*document["traceEvents"], *later]}))
    with pytest.raises(FormatError, match=r"different numbers of steps \(.*rank0.json 1, .*rank1.json 2, "):
        import_traces(paths)


def test_traces_of_two_runs_are_told(tmp_path: Path) -> None:
    timeline = chain_timeline(5)
    late = replace(
        timeline, starts_us=tuple(tuple(s + 10**4 * i for i, s in enumerate(row)) for row in timeline.starts_us)
    )
    late = replace(late, ends_us=tuple(tuple(e + 10**4 * i for i, e in enumerate(row)) for row in timeline.ends_us))
    paths = written(tmp_path, timeline, [0, 0, 0])
    other = tmp_path / "other"
    other.mkdir()
    paths[1] = written(other, late, [0, 0, 0])[1]
    told = (
        r"contradict each other: .*, such as from \d[FB]\d on rank \d to \d[FB]\d on rank \d; give traces of the same"
    )
    with pytest.raises(FormatError, match=told):
        import_traces(paths)
    paths = written(tmp_path, timeline, [0, -2_000_000, 0])
    for path in paths:
        Path(path).write_text(json.dumps({**json.loads(Path(path).read_text()), "host_name": "here"}))
    with pytest.raises(FormatError, match=r"are both of machine here, but by their messages 2.0 s apart"):
        import_traces(paths)


def test_gzip_is_unpacked_and_what_is_none_or_large_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json.gz"
    packed = gzip.compress(trace().encode())
    path.write_bytes(packed)
    assert str(import_traces([str(path)]).timeline.plan.orders[0][0]) == "0F0"
    path.write_bytes(packed[:-20])
    with pytest.raises(FormatError, match=r"trace.json.gz: cannot be (unpacked|read)"):
        import_traces([str(path)])
    monkeypatch.setattr(trace_files, "LARGEST_BYTES", 10_000)
    path.write_bytes(gzip.compress(b" " * 10_001))
    with pytest.raises(FormatError, match=r"trace.json.gz: more than 10000 bytes unpacked; profile fewer steps"):
        import_traces([str(path)])
    with pytest.raises(FormatError, match=r"absent.json: cannot be read: No such file"):
        import_traces([str(tmp_path / "absent.json")])


@pytest.mark.parametrize(
    ("times", "told"),
    [
        ([(0, 5), (3, 8)], "give no run of a pipeline: timeline: rank 0, op 2: 3 µs comes after 5 µs"),
        ([(0, 5), (10**15 + 6, 10**15 + 7)], "the step takes 1000000000000007 µs; expected 1000000000000000 or less"),
    ],
)
def test_what_no_pipeline_does_is_refused(times: list[tuple[int, int]], told: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(trace(traceEvents=[event("user_annotation", f"PP:0F{m}", *of) for m, of in enumerate(times)]))
    with pytest.raises(FormatError, match=told):
        import_traces([str(path)])


def test_forwards_alone_are_planned_for_inference(tmp_path: Path) -> None:
    placement = place(Costs.uniform(4), Cluster.uniform(2), [0, 1, 0, 1]).forward_only()
    plan = Plan(placement, 3, schedules.forward_only(placement, 3).orders)
    imported = import_traces(written(tmp_path, measured_like(plan, random.Random(3), longest_us=50), [0, 0]))
    assert imported.timeline.plan.orders == plan.orders
    assert {task.kind for task in imported.timeline.plan.placement.tasks} == {Kind.F}


# --- runs of PyTorch's own schedules, traced by torch.profiler: imported as what ran, and explained -------------------


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
