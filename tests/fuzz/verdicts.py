"""What must hold of every file: it is refused by an error of ours, in a line, or what was read from it is right.

What is read is used by functions of which none may raise an error, but where `tried` lets it refuse.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from tempfile import TemporaryDirectory
from typing import TypeVar

from rota import Cluster, Costs, Op, Plan, RotaError, Timeline, check, compare, cutting, explain, place, simulate
from rota.compat.tessel.schedule.schedplan import SchedPlan
from rota.core.layers import LayerCosts, Profile
from rota.drawing import to_chrome_trace, to_html, to_text
from rota.interop import ImportedTrace, deepspeed, megatron, torchtitan

Made = TypeVar("Made")
_SLOW = 0.25  # share of the files on which what takes long is tried
_FEW = 60  # stages, of which a plan is soon made


def refused(error: RotaError) -> str:
    """Its type's name, if its words can be shown."""
    told = str(error)
    assert told.isprintable(), f"not one printable line: {told!r}"
    assert len(told) < 2000, f"an error of {len(told)} characters: {told[:200]!r}"
    return type(error).__name__


def tried(function: Callable[[], Made]) -> Made | None:
    """What it returns; None where it refuses."""
    try:
        return function()
    except RotaError as error:
        refused(error)
        return None


def assert_read_back(made: Plan | Timeline | Costs | Profile | LayerCosts | Cluster) -> None:
    text = made.to_json()
    again = type(made).from_json(text)
    assert again == made
    assert again.to_json() == text


def of_plan(loaded: Plan | Timeline, chooser: Random) -> str:
    if isinstance(loaded, Timeline):
        return of_timeline(loaded, chooser)
    assert_read_back(loaded)
    again = [tried(partial(csv_and_back, loaded, form)) for form in ({}, {"communication": True})]
    try:
        check(loaded)
    except RotaError as error:
        outcome = refused(error)
        if (timeline := tried(lambda: simulate(loaded))) is not None:  # too much memory alone
            assert_right(timeline)
        return outcome
    assert all(read in (None, loaded) for read in again)
    timeline = simulate(loaded)
    assert_right(timeline)
    for peak, limit in zip(timeline.peak_memory_bytes, loaded.placement.cluster.limit_bytes, strict=True):
        assert limit is None or peak <= limit
    use(timeline, chooser)
    return "accepted"


def csv_and_back(plan: Plan, form: dict[str, bool]) -> Plan:
    """The CSV says nothing of a usage, nor of orders of service."""
    read = Plan.from_csv(plan.to_csv(**form), plan.placement)
    return replace(read, usage=plan.usage, service_orders=plan.service_orders)


def of_timeline(timeline: Timeline, chooser: Random) -> str:
    assert_read_back(timeline)
    assert timeline.makespan_us >= max(timeline.busy_us)
    found = compare(timeline.plan, timeline)
    assert found.difference_us == sum(found.parts_us.values())
    use(timeline, chooser)
    return "accepted"


def use(timeline: Timeline, chooser: Random) -> None:
    """What a user may do with what was read."""
    _ = timeline.peak_memory_bytes, timeline.span_us, timeline.bubble_fraction
    timeline.critical_path()
    to_text(timeline, 60)
    if chooser.random() < _SLOW:
        tried(lambda: to_html(timeline))
        tried(lambda: to_chrome_trace(timeline))
        if (told := tried(lambda: explain(timeline))) is not None:
            assert sum(told.by_cause.values()) == sum(timeline.idle_us)
            told.to_text()


def assert_right(timeline: Timeline) -> None:
    """A simulated timeline obeys its plan: nothing overlaps, and nothing starts before what it reads is there."""
    plan = timeline.plan
    assert Timeline.from_json(timeline.to_json()) == timeline
    spans = {(span.rank, span.work): span for span in timeline.op_spans()}
    for rank, starts in enumerate(timeline.starts_us):
        assert all(after >= before for before, after in zip(timeline.ends_us[rank], starts[1:], strict=False))
        assert timeline.makespan_us >= timeline.busy_us[rank]
    for (rank, op), span in spans.items():
        target = plan.placement.index[op.stage, op.kind]
        for edge in plan.placement.edges:
            source = plan.placement.tasks[edge.source]
            if edge.target == target:
                made = max(spans[r, Op(source.stage, source.kind, op.microbatch)].end_us for r in source.ranks)
                assert made <= span.start_us, f"{op} on rank {rank} starts at {span.start_us}, {source} ends at {made}"
    assert len(plan.wire_order) == plan.num_ops + len(plan.transfers)
    assert len(spans) == sum(len(order) for order in plan.orders)


def of_costs(costs: Costs, chooser: Random) -> str:
    assert_read_back(costs)
    placement = tried(lambda: place(costs, Cluster.uniform(costs.num_stages)))
    return "accepted" if placement is None else "accepted and placed"


def of_traces(imported: ImportedTrace, chooser: Random) -> str:
    assert imported.to_text().replace("\n", " ").isprintable()
    return of_timeline(imported.timeline, chooser)


def of_schedule(schedule: SchedPlan, chooser: Random) -> str:
    repr(schedule)
    tried(schedule.to_plan)
    with TemporaryDirectory() as folder:
        schedule.save(f"{folder}/again.json")
        assert repr(SchedPlan.load(f"{folder}/again.json")) == repr(schedule)
    return "accepted"


def of_profile(profile: Profile, chooser: Random) -> str:
    assert_read_back(profile)
    assert [profile[rows].rows for rows in profile] == [*profile]
    return max(of_layers(layers, chooser) for layers in profile.layers)


def of_layers(layers: LayerCosts, chooser: Random) -> str:
    """Stages of any uniform cut are the sums of their layers, or are refused: bytes that are shared may be too many."""
    assert_read_back(layers)
    cut = True
    for num_stages in range(1, layers.num_layers + 1):
        boundaries = cutting.uniform(layers.num_layers, num_stages)
        for form in ({}, {"split_backward": True}, {"recompute": range(num_stages)}):
            costs = tried(partial(layers.stages, boundaries, **form))
            cut = cut and costs is not None
            if costs is not None:
                assert sum(costs.forward_us) == sum(layers.forward_us)
                of_costs(costs, chooser)
    return "accepted and cut" if cut else "accepted"


def of_cluster(cluster: Cluster, chooser: Random) -> str:
    assert_read_back(cluster)
    for sender, receiver, _ in cluster.links:
        assert cluster.link_between(sender, receiver).transfer_us(10) >= 0
    placed = tried(lambda: place(Costs.uniform(cluster.num_ranks), cluster))
    return "accepted" if placed is None else "accepted and placed"


def of_export(imported: torchtitan.Imported, chooser: Random) -> str:
    plan, parts, *_ = imported
    assert imported.boundaries[-1] == sum(map(len, parts))
    assert len(parts) == plan.num_stages
    with TemporaryDirectory() as folder:
        written = tried(lambda: torchtitan.export(parts, plan, folder))
        for path in written or ():
            if path.suffix != ".csv":
                assert torchtitan.load(path)[:2] == (plan, parts)
    return "accepted and exported" if written and of_plan(plan, chooser) == "accepted" else "accepted"


def of_layout(layout: megatron.Layout, chooser: Random) -> str:
    text = megatron.write_layout(layout)
    assert megatron.read_layout(text, layout.num_ranks) == layout
    if len(layout.stages) <= _FEW:
        plan = tried(lambda: megatron.plan_of(layout, Costs.uniform(len(layout.stages)), 2 * layout.num_ranks))
        assert plan is None or megatron.runs_in_this_order(plan)
    return "accepted"


def of_boundaries(boundaries: tuple[int, ...], chooser: Random) -> str:
    assert deepspeed.read_boundaries(deepspeed.write_boundaries(boundaries)) == boundaries
    deepspeed.is_uniform(boundaries)
    if len(boundaries) <= _FEW:
        plan = deepspeed.plan_of(boundaries, Costs.uniform(len(boundaries) - 1), 3)
        assert deepspeed.runs_in_this_order(plan)
        assert deepspeed.boundaries_for(plan, boundaries) == boundaries
    return "accepted"
