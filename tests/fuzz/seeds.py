"""What the mutants are made from: real files of each type, small, and as different as they come."""

import json
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from rota import Costs, LayerCosts, Profile, StepEnd, Timeline, bidirectional, interleaved, place, schedules, simulate
from rota.core.cluster import AllReduceTimes, Cluster, Link, SharedLink
from rota.core.plan import Plan, Usage
from rota.interop import torchtitan
from support.measured import measured_like
from support.trace_files import written

_COSTS = (
    Costs.uniform(3, forward_us=5, backward_us=9, activation_bytes=4, boundary_bytes=2, static_bytes=10),
    Costs.uniform(3, weight_us=1, activation_bytes=4, input_frees_bytes=1, boundary_bytes=3, gradient_bytes=2),
    Costs.uniform(3, recompute_us=1, activation_bytes=6, checkpoint_bytes=1, forward_peak_bytes=2),
    Costs(
        (50, 70, 60), (110, 130, 120), reduce_us=(3, 0, 9), optimizer_us=(4, 4, 4), edges=((0, 1), (1, 2), (0, 2)),
        boundary_bytes=(10, 20, 5), gradient_bytes=(10, 20, 5), note="measured on a machine of its own",
    ),
    Costs((5, 6), (7, 8), recompute_us=(None, 3), activation_bytes=(2, 9), spread_us=(1, 2)),
)  # fmt: skip
_CLUSTER = Cluster((40, None, 90), Link(1, 2), ((0, 1, Link(4, 1)), (2, 1, Link(0, None))))
_HOST = (SharedLink("host", 1, (0, 1), (1, 2)),)
_SUMS = (AllReduceTimes(2, ((1024, 90), (65536, 140))), AllReduceTimes(3, ((1024, 120),)))


@cache
def plans() -> tuple[Plan, ...]:
    """Chains, interleaved ones, two streams, a graph, tasks on several ranks, recomputation, inference, and more."""
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
        replace(schedules.one_f_one_b(ended, 3), usage=Usage(("blocks[0]", "blocks[2]"), 4, 2, (1, 2, 5))),
        replace(schedules.gpipe(place(split, Cluster.uniform(3)), 2), usage=Usage((), 1)),
        _served(schedules.gpipe(place(whole, replace(_CLUSTER, link=Link(1, 2), shared=_HOST)), 2)),
    )


def _served(plan: Plan) -> Plan:
    """With the order of service that first come, first served gives."""
    transfers = dict(plan.shared_transfers.transfers())
    return replace(plan, service_orders=tuple(tuple(transfers[node] for node in nodes) for nodes in plan.served))


@cache
def plan_texts() -> tuple[str, ...]:
    return tuple(plan.to_json() for plan in plans())


@cache
def csv_texts() -> tuple[str, ...]:
    chains = [plans()[i] for i in (0, 2, 5, 7)]
    forms = ({}, {"communication": True})
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
def schedule_texts() -> tuple[str, ...]:
    """Tessel's own files have fewer fields than ours."""
    row = {"span": 1, "memory": 1.0, "btype": "forward", "device": [0]}
    blocks = [{**row, "mid": m, "gid": m, "step": 3 * m, "before": []} for m in range(3)]
    blocks += [{**row, "mid": m, "gid": 9, "step": 3 * m + 1, "btype": "backward", "before": [m]} for m in range(3)]
    fields = {"ndevs": 2, "repetend": [0, 3], "period": 3, "repeated": [0, 3], "blocks": blocks}
    return json.dumps(fields), json.dumps({"ndevs": 1, "repetend": None, "blocks": blocks[:3]})


@cache
def layers() -> tuple[LayerCosts, ...]:
    """A graph with all that layers may have in common, at two micro-batch sizes, and a single layer."""
    chooser = Random(3)
    columns = [field.name for field in fields(LayerCosts) if field.name.endswith(("_us", "_bytes"))]
    whole = LayerCosts(
        **{name: tuple(chooser.randrange(50, 100) for _ in range(4)) for name in columns},
        rows=2, cuts=("blocks[0]", "blocks[1]", "cut"), edges=((0, 1), (1, 2), (0, 2), (2, 3)),
        shared=((0, 2, 9), (1, 2, 20)), waiting_shared=((1, 3, 8),), tied=((0, 3, 30),),
        spread=(0.01, 0.5, 0, 0.25), note="measured on a machine of its own",
    )  # fmt: skip
    of_edges = {"boundary_bytes": (), "boundary_gradient_bytes": (), "received_bytes": ()}
    alone = LayerCosts(**{**dict.fromkeys(columns, (7,)), **of_edges}, rows=1, cuts=(), edges=())
    return whole, replace(whole, rows=4, forward_us=(100, 120, 90, 60), shared=()), alone


@cache
def layers_texts() -> tuple[str, ...]:
    return tuple(entry.to_json() for entry in layers())


@cache
def profile_texts() -> tuple[str, ...]:
    two, four, alone = layers()
    key = (("model", "4 layers"), ("device", "a GPU"), ("inputs of 2 rows", "int64 [2, 8]"))
    return Profile((two, four), key).to_json(), Profile((alone,)).to_json()


@cache
def cluster_texts() -> tuple[str, ...]:
    uniform = Cluster.uniform(4, 10**9, latency_us=2, bytes_per_us=3)
    return replace(_CLUSTER, all_reduces=_SUMS).to_json(), uniform.to_json()


@cache
def exports() -> tuple[dict[str, str], ...]:
    """Of each plan the files for torchtitan, by name."""
    two = Cluster.uniform(2)
    whole, split = Costs.uniform(4), Costs.uniform(4, weight_us=1)
    made = (
        schedules.one_f_one_b(place(Costs.uniform(4), Cluster.uniform(4)), 4),
        schedules.interleaved_one_f_one_b(interleaved(whole, two), 4),
        schedules.NAMED["zb_v"](schedules.NAMED["zb_v"].place(split, two), 4),
    )
    parts = (("tok_embeddings", "layers.0"), ("layers.1",), ("layers.2",), ("norm", "output"))
    found = [torchtitan.render(parts, plan, "titan") for plan in made]
    return tuple({path.name: text for path, text in texts.items()} for texts in found)


def export_texts(name: str) -> tuple[str, ...]:
    return tuple(files[name] for files in exports())


@cache
def layout_texts() -> tuple[str, ...]:
    """Of Megatron, for two ranks."""
    return "Et*3|(tt|)*5,m|L", "Ett|ttL", "E|t,t|(t|)*12tt|tmmL", "(Et|)*1|(t*2|)*3L\n"


@cache
def boundaries_texts() -> tuple[str, ...]:
    return "[0, 3, 3, 17, 20]", "[0, 1]", json.dumps([*range(0, 60, 5)])
