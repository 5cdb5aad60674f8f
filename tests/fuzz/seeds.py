"""What the mutants are made from: real files of each type, small, and as different as they come."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from measured import measured_like
from rota import schedules
from rota.costs import Cluster, Costs, Link
from rota.placement import StepEnd
from rota.placing import bidirectional, interleaved, place
from rota.plan import Plan
from rota.simulation import simulate
from rota.timeline import Timeline
from trace_files import written

_COSTS = (
    Costs.uniform(3, forward_us=5, backward_us=9, activation_bytes=4, boundary_bytes=2, static_bytes=10),
    Costs.uniform(3, weight_us=1, activation_bytes=4, input_frees_bytes=1, boundary_bytes=3, gradient_bytes=2),
    Costs.uniform(3, recompute_us=1, activation_bytes=6, checkpoint_bytes=1, forward_peak_bytes=2),
    Costs(
        (50, 70, 60), (110, 130, 120), reduce_us=(3, 0, 9), optimizer_us=(4, 4, 4), edges=((0, 1), (1, 2), (0, 2)),
        boundary_bytes=(10, 20, 5), gradient_bytes=(10, 20, 5), note="measured on a machine of its own",
    ),
    Costs((5, 6), (7, 8), recompute_us=(None, 3), activation_bytes=(2, 9)),
)  # fmt: skip
_CLUSTER = Cluster((40, None, 90), Link(1, 2), ((0, 1, Link(4, 1)), (2, 1, Link(0, None))))


@cache
def plans() -> tuple[Plan, ...]:
    """Chains, interleaved ones, two streams, a graph, tasks on several ranks, recomputation, inference."""
    whole, split, recomputed, graph, _ = _COSTS
    two = Cluster.uniform(2, 1000, latency_us=2, bytes_per_us=3)
    ended = place(whole, _CLUSTER)
    return (
        schedules.one_f_one_b(ended, 4),
        schedules.gpipe(place(graph, _CLUSTER), 3),
        schedules.zb_h1(place(split, Cluster.uniform(3)), 4),
        schedules.gpipe(place(whole, _CLUSTER, [0, (1, 2), (2, 0)]), 2),
        schedules.gpipe(place(recomputed, Cluster.uniform(3)), 2),
        schedules.interleaved_one_f_one_b(interleaved(Costs.uniform(4, boundary_bytes=1), two), 4),
        schedules.chimera(bidirectional(Costs.uniform(2, boundary_bytes=1), two), 4),
        schedules.forward_only(place(whole, two, [0, 1, 0]).forward_only(), 3),
        schedules.gpipe(replace(ended, step_ends=(StepEnd(2, 5, 7), StepEnd(0, 0, 3))), 2),
    )


@cache
def plan_texts() -> tuple[str, ...]:
    return tuple(plan.to_json() for plan in plans())


@cache
def csv_texts() -> tuple[str, ...]:
    chains = [plans()[i] for i in (0, 2, 5, 7)]
    forms = ({}, {"communication": True}, {"overlap": True}, {"communication": True, "overlap": True})
    return tuple(plan.to_csv(**form) for plan in chains for form in forms)


@cache
def timelines() -> tuple[Timeline, ...]:
    """Simulated, and as if measured."""
    chooser = Random(1)
    return (*map(simulate, plans()), *(measured_like(plan, chooser) for plan in plans()))


@cache
def timeline_texts() -> tuple[str, ...]:
    return tuple(timeline.to_json() for timeline in timelines())


@cache
def costs_texts() -> tuple[str, ...]:
    return tuple(costs.to_json() for costs in _COSTS)


@cache
def trace_texts() -> tuple[tuple[str, ...], ...]:
    """Of each run the texts of its ranks' traces."""
    chooser, found = Random(2), []
    for plan in (plans()[0], plans()[2], plans()[5]):
        for on_accelerator in (False, True):
            with TemporaryDirectory() as folder:
                offsets = [chooser.randrange(100) for _ in plan.orders]
                paths = written(Path(folder), _lasting(plan, chooser), offsets, on_accelerator)
                found.append(tuple(Path(path).read_text() for path in paths))
    return tuple(found)


def _lasting(plan: Plan, chooser: Random) -> Timeline:
    """As if measured, with times that a trace shows: none is 0."""
    while True:
        timeline = measured_like(plan, chooser, longest_us=300)
        if all(span.duration_us for span in (*timeline.op_spans(), *timeline.transfer_spans())):
            return timeline


@cache
def manifest_texts() -> tuple[str, ...]:
    from rota.runtime.checkpoint_files import File, Manifest

    files = {name: File(30, "ab" * 32) for name in ("__0_0.distcp", ".metadata", "plan.json", "training.pt")}
    extra = {"position": [3, None, {"a": 0.5}], "epoch": 2, "note": "good"}
    whole = Manifest(3, 20, extra, 2, 1, {"a.weight": 1, "b": 4}, {"c": "b"}, files)
    return whole.to_json(), replace(whole, number=1, step=0, extra={}, aliases={}).to_json()


@cache
def schedule_texts() -> tuple[str, ...]:
    """Tessel's own files have fewer fields than ours."""
    row = {"span": 1, "memory": 1.0, "btype": "forward", "device": [0]}
    blocks = [{**row, "mid": m, "gid": m, "step": 3 * m, "before": []} for m in range(3)]
    blocks += [{**row, "mid": m, "gid": 9, "step": 3 * m + 1, "btype": "backward", "before": [m]} for m in range(3)]
    fields = {"ndevs": 2, "repetend": [0, 3], "period": 3, "repeated": [0, 3], "blocks": blocks}
    return json.dumps(fields), json.dumps({"ndevs": 1, "repetend": None, "blocks": blocks[:3]})
