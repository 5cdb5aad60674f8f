"""Rehearsals: every plan runs to its end, in its order and with messages of its sizes, and no process is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from rota import Cluster, Costs, PipelineError, Placement, Plan, Timeline, place, rehearse, simulate
from rota.cli import main
from rota.memory import task_changes
from rota.placement import Edge
from rota.planning.rehearsal import rank as rehearsed_rank
from rota.planning.rehearsal import rehearse_batches
from rota.planning.rehearsal.rank import RankReport, run_rank
from rota.planning.rehearsal.rehearsing import measured_timeline
from rota.runtime.transport import Transport
from rota.schedules import FAMILIES, NAMED
from rota.shapes import SHAPES
from runtime.test_timeline import assert_possible
from support import ROOT
from support.pool import Pool
from support.random_plans import random_plan
from support.sampling import IS_WHOLE, some

pytestmark = pytest.mark.dist

NUM_RANKS, NUM_STEPS = 4, 1
DOCS = ROOT / "docs" / "rehearsal.md"

# --- all plans --------------------------------------------------------------------------------------------------------


def costs_of(num_stages: int) -> Costs:
    """Times from 0 up; sizes from 0 up, different ones for the two directions; all that ends a step."""
    numbers = range(num_stages)
    return Costs(
        forward_us=tuple(300 * (s % 3) for s in numbers),
        backward_us=tuple(200 * (s % 4) for s in numbers),
        activation_bytes=tuple(1000 + s for s in numbers),
        boundary_bytes=tuple(70_000 * (s % 3) for s in numbers[1:]),
        gradient_bytes=tuple(3 * (s % 2) for s in numbers[1:]),
        forward_peak_bytes=17,
        static_bytes=5000,
        reduce_us=tuple(100 * (s % 2) for s in numbers),
        optimizer_us=50,
    )


def plans() -> list[Plan]:
    """Of every family and every shape, and random ones: DAGs, stages on several ranks, forwards only."""
    found = []
    for family in FAMILIES:
        costs = family.adapted(costs_of(NUM_RANKS * family.stages_per_rank))
        placement = family.place(costs, Cluster.uniform(NUM_RANKS))
        if family.name == "seq1f1b":
            placement = placement.in_chunks(2, 2 * NUM_RANKS)
        found.append(family(placement, 2 * NUM_RANKS))
    for shape in SHAPES.values():
        costs = costs_of(shape.per_rank * NUM_RANKS + shape.shared)
        if shape.shared:  # joined and parted as the shape has it
            costs = replace(costs, boundary_bytes=7, gradient_bytes=0)
        placement = shape.place(costs, Cluster.uniform(NUM_RANKS))
        found.append(NAMED["gpipe"](placement, 4))
    for seed in range(some(12)):
        _, plan = random_plan(seed, NUM_RANKS)
        edges = tuple(
            Edge(a, b, 11 * i if plan.placement.tasks[a].stage != plan.placement.tasks[b].stage else 0)
            for i, (a, b, _) in enumerate(plan.placement.edges)
        )
        found.append(replace(plan, placement=replace(plan.placement, edges=edges)))
    return found


class Counted:
    """Stands before the process group's backend, and notes the sizes of what passes: sent to and received from each."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.sent: dict[int, list[int]] = {}
        self.received: dict[int, list[int]] = {}

    def send(self, tensors: list[torch.Tensor], receiver: int, tag: int) -> Any:
        self.sent.setdefault(receiver, []).extend(tensor.nbytes for tensor in tensors)
        return self.backend.send(tensors, receiver, tag)

    def recv(self, tensors: list[torch.Tensor], sender: int, tag: int) -> Any:
        self.received.setdefault(sender, []).extend(tensor.nbytes for tensor in tensors)
        return self.backend.recv(tensors, sender, tag)


Outcome = tuple[RankReport, dict[int, list[int]], dict[int, list[int]]]


def rehearse_each(rank: int, cases: list[tuple[Plan, bool]]) -> list[Outcome]:
    found: list[Outcome] = []
    for plan, allocate in cases:
        made = []

        def counted(*groups: Any, made: list[Counted] = made) -> Transport:
            transport = Transport(*groups)
            made.append(Counted(transport._backend))
            transport._backend = made[0]
            return transport

        once = mock.patch.object(rehearsed_rank, "num_warm_ups", return_value=1)  # more would test no more
        with mock.patch.object(rehearsed_rank, "Transport", counted), once:
            report = run_rank([plan], NUM_STEPS, allocate, timeout_s=150)
        found.append((report, made[0].sent, made[0].received))
    return found


def rehearse_in_turn(rank: int, plans: list[Plan]) -> RankReport:
    del rank
    return run_rank(plans, 1, False, timeout_s=150)


def test_batches_run_one_after_another_each_as_its_own_plan(pool: Pool) -> None:
    placement = place(costs_of(2), Cluster.uniform(2))
    plans = [NAMED["1f1b"](placement, 3), NAMED["gpipe"](placement, 5), NAMED["1f1b"](placement, 2)]
    reports = pool.run(2, rehearse_in_turn, plans)
    ends_ns = 0
    for i, plan in enumerate(plans):
        timeline = measured_timeline(plan, reports, i)
        assert timeline.plan.orders == plan.orders
        assert timeline.makespan_us >= simulate(plan).makespan_us
        starts_ns = min(report.steps[i].starts_ns[0] for report in reports)
        assert starts_ns > ends_ns
        ends_ns = max(report.steps[i].ends_ns[-1] for report in reports)


def test_batches_are_refused_before_a_process_is_started() -> None:
    plans = [NAMED["1f1b"](place(Costs.uniform(n), Cluster.uniform(n)), 2) for n in (2, 3)]
    with pytest.raises(PipelineError, match="have 3 and 2 ranks"):
        rehearse_batches(plans)
    with pytest.raises(PipelineError, match="no plan to rehearse"):
        rehearse_batches([])


def test_every_plan_runs_to_its_end_as_planned(pool: Pool) -> None:
    all_plans = plans()
    kinds = {task.kind for plan in all_plans for task in plan.placement.tasks}
    assert kinds == {*"FBIWR"}
    assert any(plan.placement.num_components > 1 for plan in all_plans)
    assert any(len(task.ranks) > 1 for plan in all_plans for task in plan.placement.tasks)
    assert {0} < {route.num_bytes for plan in all_plans for route in plan.placement.routes}
    both = [(plan, allocate) for plan in all_plans for allocate in (True, False)]
    cases = both if IS_WHOLE else both[::4] + both[3::4]
    by_rank = pool.run(NUM_RANKS, rehearse_each, cases)
    for case, (plan, allocate) in enumerate(cases):
        outcomes = [of_rank[case] for of_rank in by_rank]
        assert_messages(plan, outcomes)
        assert_order_and_times(plan, [report for report, _, _ in outcomes])
        if allocate:
            assert [report.held_bytes for report, _, _ in outcomes] == [
                held_peak_bytes(plan, rank) for rank in range(NUM_RANKS)
            ]


def assert_messages(plan: Plan, outcomes: list[Outcome]) -> None:
    """In each step each pair exchanges what the plan says, in the plan's order."""
    for a in range(NUM_RANKS):
        for b in range(NUM_RANKS):
            planned = [t.num_bytes for t in plan.transfers if (t.sender, t.receiver) == (a, b)]
            assert outcomes[a][1].get(b, []) == planned * (1 + NUM_STEPS)
            assert outcomes[b][2].get(a, []) == planned * (1 + NUM_STEPS)


def assert_order_and_times(plan: Plan, reports: list[RankReport]) -> None:
    timeline = measured_timeline(plan, reports, 0)
    if plan.placement.step_ends:
        assert timeline.makespan_us == max(end for *_, end in timeline.step_ends_us)
        last = max((ends[-1] for ends in timeline.ends_us if ends), default=0)
        timeline_of_ops = replace(timeline, plan=without_step_ends(plan), step_ends_us=())
        assert timeline_of_ops.makespan_us == last
    else:
        timeline_of_ops = timeline
    if timeline_of_ops.makespan_us:
        assert_possible(timeline_of_ops)
    assert Timeline.from_json(timeline.to_json()) == timeline
    for measured, planned in zip(timeline.op_spans(), simulate(plan).op_spans(), strict=True):
        assert (measured.rank, measured.work, measured.duration_us) == (planned.rank, planned.work, planned.duration_us)
    for (i, rank), (reduce, reduced, optimize, optimized) in zip(
        plan.step_end_ranks, timeline.step_ends_us, strict=True
    ):
        end = plan.placement.step_ends[i]
        gradients = [
            ended
            for op, ended in zip(plan.orders[rank], timeline.ends_us[rank], strict=True)
            if op.stage == end.stage and op.kind.makes_weight_gradients
        ]
        assert reduce == max(gradients, default=reduce)
        assert reduced - reduce == end.reduce_us
        assert optimize >= max(reduced, timeline.ends_us[rank][-1])
        assert optimized - optimize == end.optimizer_us


def without_step_ends(plan: Plan) -> Plan:
    return replace(plan, placement=replace(plan.placement, step_ends=()))


def held_peak_bytes(plan: Plan, rank: int) -> int:
    """Static bytes and what the ops take, messages aside."""
    quiet = replace(plan.placement, edges=tuple(edge._replace(num_bytes=0) for edge in plan.placement.edges))
    changes = task_changes(quiet, rank)
    level = most = plan.placement.static_bytes[rank]
    for op in plan.orders[rank]:
        at_start, at_end = changes[op.stage, op.kind]
        most = max(most, level + at_start)
        level += at_start + at_end
    return most


# --- processes --------------------------------------------------------------------------------------------------------


def ranks_of(caller: int) -> dict[int, int]:
    """Processes of the ranks that a rehearsal of `caller` has started, by rank."""
    parents, names = {}, {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            name, _, rest = (process / "stat").read_text().rpartition(")")
            parents[int(process.name)], names[int(process.name)] = int(rest.split()[1]), name.partition("(")[2]
    found = {}
    for process, name in names.items():
        if (of := re.fullmatch(r"rota rank (\d+)", name)) and parents.get(parents[process]) == caller:
            found[int(of[1])] = process
    return found


def assert_gone(processes: list[int]) -> None:
    deadline = time.monotonic() + 60
    while [p for p in processes if Path(f"/proc/{p}").exists()] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [p for p in processes if Path(f"/proc/{p}").exists()] == []


def small_plan(num_ranks: int = 2) -> Plan:
    placement: Placement = place(Costs.uniform(num_ranks, 1000, 2000, boundary_bytes=100), Cluster.uniform(num_ranks))
    return NAMED["1f1b"](placement, 3)


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGKILL, "rank 1 ended with signal 9, and the others were ended"),
        pytest.param(
            signal.SIGSTOP,
            r"rank 0 ended with exit code 70, .* for 5 s, .* rank 1 never answered; it is stopped",
            marks=pytest.mark.faults,
        ),
    ],
)
def test_a_rank_that_is_killed_or_stuck_is_told(number: signal.Signals, told: str) -> None:
    processes: list[int] = []

    def disturb(doing: str) -> None:
        if doing == "step 1 of 100000 ended":
            ranks = ranks_of(os.getpid())
            processes.extend(ranks.values())
            os.kill(ranks[1], number)

    with pytest.raises(PipelineError, match=told):
        rehearse(small_plan(), num_steps=100_000, timeout_s=5, progress=disturb)
    assert len(processes) == 2
    assert_gone(processes)


@pytest.mark.faults
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_no_rank_outlives_the_command(tmp_path: Path, number: signal.Signals, code: int) -> None:
    (tmp_path / "plan.json").write_text(small_plan().to_json())
    command = [sys.executable, "-m", "rota", "rehearse", "plan.json", "--steps", "100000"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as running:
        deadline = time.monotonic() + 60
        while len(processes := [*ranks_of(running.pid).values()]) < 2 and time.monotonic() < deadline:
            assert running.poll() is None
            time.sleep(0.05)
        assert len(processes) == 2
        running.send_signal(number)
        assert running.wait(100) == code
        assert_gone(processes)
        assert running.stderr is not None
        told = running.stderr.read().splitlines()
    told = [line for line in told if not line.endswith(" ended")]  # progress, on a machine that was busy before
    told = [line for line in told if not line.startswith("starting 2 processes")]  # progress, where it takes long
    assert told == (["rota rehearse: interrupted"] if number is signal.SIGINT else [])
    deadline = time.monotonic() + 60
    while [*tmp_path.glob("rota-rehearsal-*")] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_the_page_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in re.findall(r"^    rota (.*)$", DOCS.read_text(), flags=re.MULTILINE):
        assert main(command.split()) == 0
    out = capsys.readouterr().out
    assert re.search(r"^runs to its end; [\d.,]+ ms against 135.0 simulated, ", out, flags=re.MULTILINE)
    assert re.search(r"^  1→0 +8 +131 kB ", out, flags=re.MULTILINE)
    assert re.search(r"^  0 +120 MB +120 MB ", out, flags=re.MULTILINE)
    assert "bubble" in out
    (example,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    exec(compile(example, str(DOCS), "exec"), {"__name__": "example"})
    out = capsys.readouterr().out
    assert out.startswith("runs to its end; ")
    measured = Timeline.from_json((tmp_path / "rehearsed.json").read_text())
    assert measured.plan == Plan.from_json((tmp_path / "plan.json").read_text())
