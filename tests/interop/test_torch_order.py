"""PyTorch's engine runs a CSV with communication in its order: recorded over Gloo, and compared with the export."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, schedules

from rota import Cluster, Costs, Kind, Plan, RotaError, find_plan, interleaved
from rota.core.schedule_csv import stage_ranks
from rota.interop import keep_order, parts_beginning_with, schedule_from, torchtitan
from rota.interop.torch_order import derived
from rota.schedules import NAMED
from support.plain_gpt import GPT, batch_of, loss_fn, pruned
from support.pool import Pool

NUM_MICROBATCHES = 6
PARTS = {2: ("layers.3",), 4: ("layers.1", "layers.3", "layers.5")}
MESSAGES = ("SEND_F", "SEND_B", "RECV_F", "RECV_B")


def parts_of(num_stages: int) -> tuple[tuple[str, ...], ...]:
    return parts_beginning_with(GPT(), PARTS[num_stages])


def a_plan(name: str, num_ranks: int, num_stages: int) -> Plan:
    costs = Costs.uniform(num_stages, 10, 20, activation_bytes=1, boundary_bytes=1)
    if name == "searched":
        placement = interleaved(
            Costs(
                forward_us=(10, 14, 9, 17)[:num_stages], backward_us=(11, 21, 13, 16)[:num_stages]
            ).with_split_backward(),
            Cluster.uniform(num_ranks, latency_us=7),
        )
        return find_plan(placement, NUM_MICROBATCHES, time_limit_s=0.5, deterministic=True).plan
    family = NAMED[name]
    return family(family.place(family.adapted(costs), Cluster.uniform(num_ranks, latency_us=3)), NUM_MICROBATCHES)


@contextmanager
def recorded() -> Iterator[list[tuple[str, list[tuple[str, int]]]]]:
    """Each action that PyTorch's engine runs, and the calls in it: "isend" or "irecv", and the peer."""
    ran: list[tuple[str, list[tuple[str, int]]]] = []
    batch, name_of = schedules._batch_p2p, schedules._get_profiler_function_name

    def record(ops: list[Any], *arguments: Any) -> Any:
        ran[-1][1].extend((op.op.__name__, op.peer) for op in ops)
        return batch(ops, *arguments)

    def begin(action: Any) -> str:
        ran.append((str(action), []))
        return name_of(action)

    with patch.object(schedules, "_batch_p2p", record), patch.object(schedules, "_get_profiler_function_name", begin):
        yield ran


def my_stages(rank: int, csv: str, mesh: Any = None) -> list[PipelineStage]:
    whole = GPT()
    on = stage_ranks(torchtitan.schedule_csv.read(csv))
    parts = parts_of(len(on))
    stages = []
    group = None if mesh is None else mesh["pp"].get_group()
    for stage in (s for s, home in enumerate(on) if home == rank):
        module = pruned(whole, [*parts[stage]])
        if mesh is not None:
            fully_shard(module, mesh=mesh["dp"])
        stages.append(PipelineStage(module, stage, len(on), torch.device("cpu"), group=group))
    return stages


def run_step(schedule: Any, stages: list[PipelineStage]) -> tuple[float, dict[str, torch.Tensor]]:
    """The sum of the losses here, and the gradients by name."""
    held = {stage.stage_index for stage in stages}
    inputs, targets = batch_of(2 * NUM_MICROBATCHES)
    losses: list[torch.Tensor] = []
    is_last = stages[0].num_stages - 1 in held
    schedule.step(*[inputs] * (0 in held), target=targets if is_last else None, losses=losses if is_last else None)
    gradients = {}
    for stage in stages:
        for name, parameter in stage.submod.named_parameters():
            gradient = parameter.grad
            gradients[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return sum(loss.item() for loss in losses), gradients


def kept(rank: int, path: str) -> Any:
    stages = my_stages(rank, Path(path).read_text())
    schedule = schedule_from(path, stages, NUM_MICROBATCHES, loss_fn)
    run_step(schedule, stages)
    for stage in stages:
        stage.submod.zero_grad()
    with recorded() as ran:  # the second step: the first one also prepares
        result = run_step(schedule, stages)
    return [*ran], result


def assert_exact(results: list[tuple[float, dict[str, torch.Tensor]]]) -> None:
    whole = GPT()
    inputs, targets = batch_of(2 * NUM_MICROBATCHES)
    loss = loss_fn(whole(inputs), targets)
    loss.backward()
    assert abs(sum(sum_ for sum_, _ in results) / NUM_MICROBATCHES - loss.item()) <= 1e-10
    theirs = {name: gradient for _, gradients in results for name, gradient in gradients.items()}
    assert theirs.keys() == dict(whole.named_parameters()).keys()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(theirs[name], parameter.grad, rtol=1e-10, atol=1e-10)


def ordered(actions: list[str]) -> list[str]:
    """Without what PyTorch adds: unsharding, and from 2.15 on the waits."""
    return [action for action in actions if "SHARD" not in action and "WAIT" not in action]


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_stages"),
    [
        *(("1f1b", 2, 2), ("1f1b", 4, 4), ("interleaved_1f1b", 2, 4), ("zb_h1", 4, 4), ("interleaved_zb", 2, 4)),
        *(("zb_v", 2, 4), pytest.param("searched", 2, 4, marks=pytest.mark.sweep), ("searched", 4, 4)),
    ],
)
def test_what_is_executed_is_exported(pool: Pool, tmp_path: Path, name: str, num_ranks: int, num_stages: int) -> None:
    plan = a_plan(name, num_ranks, num_stages)
    torchtitan.export(parts_of(num_stages), plan, tmp_path)
    csv = tmp_path / "schedule_comms.csv"
    rows = [line.split(",") for line in csv.read_text().splitlines()]

    by_rank = pool.run(num_ranks, kept, str(csv))

    homes = stage_ranks(plan.orders)
    for rank, (ran, _) in enumerate(by_rank):
        assert ordered([action for action, _ in ran]) == rows[rank]
        for action, asked in ran:
            if any(word in action for word in MESSAGES) and "WAIT" not in action:
                stage, verb = int(action[0]), "isend" if "SEND" in action else "irecv"
                further = 1 if ("_F" in action) == ("SEND" in action) else -1
                assert asked == [(verb, homes[stage + further])], action
            else:
                assert asked == []
    for a in range(num_ranks):  # on each pair of ranks both sides ask in the same order, in both directions at once
        for b in range(a + 1, num_ranks):
            mine, other = (
                [verb for _, asked in by_rank[me][0] for verb, peer in asked if peer == you]
                for me, you in ((a, b), (b, a))
            )
            assert mine == [{"isend": "irecv", "irecv": "isend"}[verb] for verb in other]
    assert_exact([result for _, result in by_rank])


def plain(rank: int, csv: str, keeps: str | None, defers: bool) -> Any:
    """A step as torchtitan makes it, with the file that it loads; then, perhaps, our order on top."""
    stages = my_stages(rank, Path(csv).read_text())
    schedule = schedules._PipelineScheduleRuntime(stages, NUM_MICROBATCHES, loss_fn=loss_fn, defer_pp_recv=defers)
    schedule._load_csv(csv)
    if keeps is not None:
        keep_order(schedule, keeps)
    with recorded() as ran:
        result = run_step(schedule, stages)
    return [action for action, _ in ran], result


def test_the_plain_csv_runs_as_derived_and_keep_order_changes_it(pool: Pool, tmp_path: Path) -> None:
    plan = a_plan("zb_h1", 4, 4)
    csv, comms, *_ = torchtitan.export(parts_of(4), plan, tmp_path)
    expected = {None: derived(plan.to_csv()), str(comms): comms.read_text()}
    orders = {}
    for keeps, text in expected.items():
        by_rank = pool.run(4, plain, str(csv), keeps, False)
        orders[keeps] = [ordered(ran) for ran, _ in by_rank]
        cells = [ordered(line.split(",")) for line in text.splitlines()]
        assert orders[keeps] == cells
        assert_exact([result for _, result in by_rank])
        # Stages in FSDP are unsharded before the same ops.
        assert {ran.index("0UNSHARD") for ran, _ in by_rank[:1]} == {0}
    assert orders[None] != orders[str(comms)]


def sharded(rank: int, path: str) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stages = my_stages(mesh["pp"].get_local_rank(), Path(path).read_text(), mesh)
    schedule = schedule_from(path, stages, NUM_MICROBATCHES, loss_fn, scale_grads=True)
    with recorded() as ran:
        result = run_step(schedule, stages)
    dist.barrier()
    return [action for action, _ in ran], result


def test_stages_in_fsdp_are_unsharded(pool: Pool, tmp_path: Path) -> None:
    _, comms, *_ = torchtitan.export(parts_of(4), a_plan("interleaved_1f1b", 2, 4), tmp_path)
    by_rank = pool.run(4, sharded, str(comms))
    rows = [line.split(",") for line in comms.read_text().splitlines()]
    assert [ordered(ran) for ran, _ in by_rank] == [rows[0], rows[0], rows[1], rows[1]]
    assert all(any("UNSHARD" in a for a in ran) for ran, _ in by_rank)
    assert_exact([by_rank[0][1], by_rank[2][1]])


def forwards_of(plan: Plan) -> Plan:
    orders = tuple(tuple(op for op in order if op.kind is Kind.F) for order in plan.orders)
    return Plan(plan.placement.forward_only(), plan.num_microbatches, orders)


def refused(rank: int, paths: list[str], how: str) -> str:
    dist.barrier()  # a refusal may end this rank before the others have joined
    stages = my_stages(rank, Path(paths[0]).read_text())
    try:
        if how == "another schedule":
            keep_order(Schedule1F1B(stages[0], NUM_MICROBATCHES, loss_fn), paths[0])
        elif how == "compiled":
            next(stages[-1].submod.layers.children()).compile(backend="eager")
            schedule_from(paths[0], stages, NUM_MICROBATCHES, loss_fn)
        else:
            schedule_from(paths[rank if how == "differs" else -1], stages, NUM_MICROBATCHES, loss_fn)
    except RotaError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("compiled", " splits backwards into I and W, which PyTorch cannot do in a compiled module, and 'layers."),
        ("another schedule", "a Schedule1F1B runs no schedule CSV with communication; make one by"),
        ("stages", "has stages 4, but PyTorch's schedule 2"),
        ("differs", "is not the same file on all ranks of the pipeline"),
        ("forwards", 'PyTorch refuses the CSV: "Invalid backward microbatches for stage 0'),
        ("blocks", "0.csv: where each pair of ranks has a communicator"),
    ],
)
def test_what_would_go_wrong_is_refused(pool: Pool, tmp_path: Path, how: str, told: str) -> None:
    plan = a_plan("zb_h1" if how == "compiled" else "1f1b", 2, 2)
    text = {
        "blocks": [derived(plan.to_csv(), defers_receives=True)],
        "forwards": [forwards_of(plan).to_csv(communication=True)],
        "differs": [plan.to_csv(communication=True), derived(plan.to_csv())],
        "stages": [plan.to_csv(communication=True), a_plan("interleaved_1f1b", 2, 4).to_csv(communication=True)],
    }.get(how, [plan.to_csv(communication=True)])
    paths = []
    for i, each in enumerate(text):
        (tmp_path / f"{i}.csv").write_text(each)
        paths.append(str(tmp_path / f"{i}.csv"))
    answers = pool.run(2, refused, paths, how)
    assert told in answers[1]
