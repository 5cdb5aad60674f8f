"""Our orders are, op for op, those that PyTorch's schedule classes compute; the CSV goes to PyTorch and comes back."""

import re
from collections import deque
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path

import pytest

from rota import Cluster, Costs, Placement, Plan, ScheduleError, check, interleaved, wave
from rota.cli import main
from rota.schedules import FAMILIES, NAMED, Family
from rota.schedules.interleaved import interleaved_one_f_one_b, interleaved_zero_bubble, looped_bfs
from rota.schedules.one_f_one_b import eager_one_f_one_b
from support.torch_orders import fake_stages, load, runs, simulates, theirs, torch_actions, torch_orders

MOST_MICROBATCHES = 24

Schedule = Callable[[Placement, int], Plan]
FORMS = [{"communication": c} for c in (False, True)]


def differing(ours: Schedule, theirs: str, num_ranks: int, stages_per_rank: int) -> tuple[list[int], int]:
    """The numbers of micro-batches for which the orders differ, and how many of them PyTorch takes."""
    weight_us = 1 if theirs == "ScheduleInterleavedZeroBubble" else None
    placement = interleaved(Costs.uniform(num_ranks * stages_per_rank, 1, 1, weight_us), Cluster.uniform(num_ranks))
    wrong, taken = [], 0
    for num_microbatches in range(1, MOST_MICROBATCHES + 1):
        orders = torch_orders(theirs, num_ranks, stages_per_rank, num_microbatches)
        if orders is None:
            continue
        taken += 1
        if [list(map(str, order)) for order in ours(placement, num_microbatches).orders] != orders:
            wrong.append(num_microbatches)
    return wrong, taken


@pytest.mark.parametrize("num_ranks", range(2, 9))
@pytest.mark.parametrize("stages_per_rank", range(1, 5))
def test_interleaved_1f1b(num_ranks: int, stages_per_rank: int) -> None:
    """With one stage a rank PyTorch's class warms up twice as long as 1F1B does: as our eager 1F1B."""
    ours = eager_one_f_one_b if stages_per_rank == 1 else interleaved_one_f_one_b
    wrong, taken = differing(ours, "ScheduleInterleaved1F1B", num_ranks, stages_per_rank)
    assert wrong == []
    assert taken == regular(num_ranks)


@pytest.mark.parametrize("num_ranks", range(2, 9))
@pytest.mark.parametrize("stages_per_rank", range(1, 5))
def test_interleaved_zero_bubble(num_ranks: int, stages_per_rank: int) -> None:
    wrong, taken = differing(interleaved_zero_bubble, "ScheduleInterleavedZeroBubble", num_ranks, stages_per_rank)
    assert wrong == []
    assert taken == regular(num_ranks)


@pytest.mark.parametrize("num_ranks", range(2, 9))
@pytest.mark.parametrize("stages_per_rank", range(1, 5))
def test_looped_bfs(num_ranks: int, stages_per_rank: int) -> None:
    wrong, taken = differing(looped_bfs, "ScheduleLoopedBFS", num_ranks, stages_per_rank)
    assert wrong == []
    assert taken == MOST_MICROBATCHES


def regular(num_ranks: int) -> int:
    """How many numbers of micro-batches go evenly into as many rounds as there can be of at least `num_ranks`."""
    return sum(m % max(1, m // num_ranks) == 0 for m in range(1, MOST_MICROBATCHES + 1))


def planned(family: Family, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Plan:
    costs = family.adapted(Costs.uniform(num_ranks * stages_per_rank, 2, 3, 1))
    return family(family.place(costs, Cluster.uniform(num_ranks, None, 1)), num_microbatches)


#: PyTorch's form knows neither recomputation nor two chains nor chunks, and its validator wants a backward.
OF_OTHER_FORM = ("varuna", "dualpipe", "chimera", "seq1f1b", "forward_only")
OF_ONE_CHAIN = [family for family in FAMILIES if family.name not in OF_OTHER_FORM]


@pytest.mark.parametrize("family", OF_ONE_CHAIN, ids=lambda family: family.name)
def test_pytorch_takes_every_family(family: Family, tmp_path: Path) -> None:
    for num_ranks, num_microbatches in ((1, 2), (2, 5), (4, 8), (4, 13)):
        plan = planned(family, num_ranks, family.stages_per_rank, num_microbatches)
        orders = [list(map(str, order)) for order in plan.orders]
        runtime = load(plan.to_csv(), plan, tmp_path)
        assert [list(map(str, runtime.pipeline_order[rank])) for rank in range(num_ranks)] == orders

        runtime = load(plan.to_csv(communication=True), plan, tmp_path, "compute_comms")
        simulates(runtime)
        for rank, order in enumerate(orders):
            compute = list(map(theirs._Action.from_str, order))
            ours = [a for a in runtime.pipeline_order_with_comms[rank] if "SEND" not in str(a) and "RECV" not in str(a)]
            assert ours == theirs._add_reduce_grad(compute, num_microbatches)


def test_pytorchs_runtime_does_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.csv"
    for name, *sizes in (("1f1b", 4, 1, 6), ("interleaved_1f1b", 2, 3, 4), ("zb_h2", 3, 1, 5), ("gpipe", 1, 3, 2)):
        plan = planned(NAMED[str(name)], *map(int, sizes))
        path.write_text(plan.to_csv(communication=True))
        runs(plan, path)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 2), (2, 5), (4, 8), (4, 13)])
@pytest.mark.parametrize("weight_us", [1, 4])
def test_dualpipe_v_comes_and_goes(num_ranks: int, num_microbatches: int, weight_us: int, tmp_path: Path) -> None:
    """PyTorch's schedule of pairs: read, checked, and written so that PyTorch takes it again."""
    actions = torch_actions("ScheduleDualPipeV", num_ranks, 2, num_microbatches)
    text = "".join(",".join("" if a is None else str(a) for a in order) + "\r\n" for order in actions)
    placement = wave(Costs.uniform(2 * num_ranks, 4, 4, weight_us), Cluster.uniform(num_ranks))
    plan = Plan.from_csv(text, placement)
    check(plan)
    for form in FORMS:
        written = plan.to_csv(**form)
        assert Plan.from_csv(written, placement) == plan
        runtime = load(written, plan, tmp_path, "compute_comms" if form["communication"] else "compute_only")
        if form["communication"]:
            simulates(runtime)
            runs(plan, tmp_path / "plan.csv")


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("ScheduleInterleaved1F1B", (2, 2, 4)),
        ("ScheduleInterleavedZeroBubble", (3, 2, 6)),
        ("ScheduleLoopedBFS", (2, 3, 3)),
        ("ScheduleZBVZeroBubble", (3, 2, 7)),
        ("ScheduleDualPipeV", (3, 2, 8)),
    ],
)
def test_what_pytorch_writes_is_read(name: str, sizes: tuple[int, int, int], defer: bool, tmp_path: Path) -> None:
    num_ranks, stages_per_rank, num_microbatches = sizes
    family, stages = getattr(theirs, name), fake_stages(num_ranks, stages_per_rank)
    if defer and "defer_pp_recv" not in signature(family).parameters:
        pytest.skip("this PyTorch does not put receives off")
    schedule = family(stages, num_microbatches, **({"defer_pp_recv": True} if defer else {}))
    shape = wave if name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV") else interleaved
    split = None if name in ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS") else 1
    placement = shape(Costs.uniform(num_ranks * stages_per_rank, 1, 1, split), Cluster.uniform(num_ranks))
    found = []
    for form in ("compute_only", "compute_comms"):
        schedule._dump_csv(tmp_path / f"{form}.csv", format=form)
        text = (tmp_path / f"{form}.csv").read_text()
        assert ("SEND_F" in text) == ("UNSHARD" in text) == (form == "compute_comms")
        found.append(Plan.from_csv(text, placement))
        check(found[-1])
        assert main(["check", str(tmp_path / f"{form}.csv")]) == 0
    assert found[0] == found[1]


# --- interleaved 1F1B runs as Megatron-LM's `forward_backward_pipelining_with_interleaving` does ----------------------


def megatron_order(rank: int, p: int, v: int, num_microbatches: int, group_size: int) -> Iterator[str]:
    """One rank's ops as Megatron does them; chunk c of a rank is stage c p + rank."""
    chunks: list[int] = []
    microbatches: list[int] = []
    for start in range(0, num_microbatches, group_size):
        group = range(start, min(start + group_size, num_microbatches))
        chunks += [chunk for chunk in range(v) for _ in group]
        microbatches += [*group] * v
    warmup = min(p - 1 - rank if v == 1 else 2 * (p - 1 - rank) + (v - 1) * group_size, len(chunks))
    waiting: list[deque[int]] = [deque() for _ in range(v)]
    for unit in range(len(chunks) + warmup):
        if unit < len(chunks):
            yield f"{chunks[unit] * p + rank}F{microbatches[unit]}"
            waiting[chunks[unit]].append(microbatches[unit])
        if unit >= warmup:
            chunk = v - 1 - chunks[unit - warmup]
            yield f"{chunk * p + rank}B{waiting[chunk].popleft()}"


def is_legal(p: int, num_microbatches: int, group_size: int) -> bool:
    """No group may be smaller than the pipeline is long, and none larger than the batch."""
    return p <= group_size <= num_microbatches and not 0 < num_microbatches % group_size < p


def placed(p: int, v: int) -> Placement:
    return interleaved(Costs.uniform(p * v), Cluster.uniform(p))


@pytest.mark.parametrize("p", range(2, 9))
@pytest.mark.parametrize("v", range(1, 5))
def test_orders_are_megatrons(p: int, v: int) -> None:
    compared = 0
    for num_microbatches in (p, p + 1, 2 * p, 2 * p + 1, 3 * p + 2, 4 * p):
        for group_size in filter(lambda n: is_legal(p, num_microbatches, n), range(1, num_microbatches + 1)):
            plan = interleaved_one_f_one_b(placed(p, v), num_microbatches, group_size)
            for rank, order in enumerate(plan.orders):
                assert list(map(str, order)) == list(megatron_order(rank, p, v, num_microbatches, group_size))
            compared += 1
    assert compared >= 12


def refused(p: int, num_microbatches: int, group_size: int) -> None:
    """It is, and by what works."""
    with pytest.raises(ScheduleError) as caught:
        interleaved_one_f_one_b(placed(p, 2), num_microbatches, group_size)
    told = re.search(r"; give (\d+)(?: or (\d+))?$", str(caught.value))
    assert told is not None
    assert f"group_size {group_size} " in str(caught.value)
    for better in filter(None, told.groups()):
        assert is_legal(p, num_microbatches, int(better))
        interleaved_one_f_one_b(placed(p, 2), num_microbatches, int(better))


@pytest.mark.parametrize("p", range(2, 6))
def test_groups_smaller_than_the_pipeline_is_long_or_larger_than_the_batch_are_refused(p: int) -> None:
    for num_microbatches in range(p, 3 * p + 2):
        for group_size in (*range(-1, num_microbatches + 2), 10 * num_microbatches):
            if not is_legal(p, num_microbatches, group_size):
                refused(p, num_microbatches, group_size)
