"""Traces as torch.profiler would write them, of timelines that are known."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rota import Kind, Timeline

BASE_NS = 1_790_857_026_000_000_000


def event(category: str, name: str, start_us: float, end_us: float, **arguments: object) -> dict[str, Any]:
    times = {"ts": start_us, "dur": end_us - start_us}
    return {"ph": "X", "cat": category, "name": name, "pid": 7, "tid": 8, **times, "args": arguments}


def events_of(
    timeline: Timeline, rank: int, on_accelerator: bool = False, offset_us: int = 0
) -> Iterator[dict[str, Any]]:
    """As PyTorch 2.13 writes them: an action's range holds the wait for what it reads, then operators.

    With an accelerator the host is far ahead: its ranges hold launches alone. An op of no time computes nothing.
    """
    reads = {(span.work.receiver, span.work.target): span for span in timeline.transfer_spans()}  # type: ignore[union-attr]
    free = offset_us
    for i, op in enumerate(timeline.plan.orders[rank]):
        start, end = (times[rank][i] + offset_us for times in (timeline.starts_us, timeline.ends_us))
        arrives = reads[rank, op].end_us + offset_us if (rank, op) in reads else None
        host = -1000 + 2 * i if on_accelerator else min(free, start if arrives is None else arrives)
        if arrives is not None:
            letter = "F" if op.kind is Kind.F else "B"
            yield event("user_annotation", f"PP:{op.stage}RECV_{letter}{op.microbatch}", host, host + 0.5)
            if on_accelerator:
                yield event("cuda_runtime", "cudaLaunchKernel", host + 0.1, host + 0.2, correlation=f"r{i}")
                yield event("kernel", "ncclDevKernel_SendRecv(x)", arrives - 1, arrives, correlation=f"r{i}")
            else:
                yield event("user_annotation", "gloo:recv", host, arrives)
        if on_accelerator:
            yield event("user_annotation", f"PP:{op}", host + 1, host + 1.5)
            if start < end:
                yield event("cuda_runtime", "cudaLaunchKernel", host + 1.1, host + 1.2, correlation=i)
                yield event("kernel", "gemm", start, end, correlation=i)
        else:
            yield event("user_annotation", f"PP:{op}", min(free, start), end)
            yield event("cpu_op", "c10d::recv_", min(free, start), start)
            if start < end:
                yield event("cpu_op", "aten::linear", start, end)
            free = end


def written(folder: Path, timeline: Timeline, offsets_us: list[int], on_accelerator: bool = False) -> list[str]:
    paths = []
    for rank, offset in enumerate(offsets_us):
        document = {
            "distributedInfo": {"rank": rank, "world_size": len(offsets_us)},
            "baseTimeNanoseconds": BASE_NS,
            "traceEvents": list(events_of(timeline, rank, on_accelerator, offset)),
        }
        path = folder / f"rank{rank}.json"
        path.write_text(json.dumps(document))
        paths.append(str(path))
    return paths
