"""Tessel's door: its document's example, blocks and schedules, the composer, the files and the command."""

import json
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rota import FormatError, Pipeline, Plan, ScheduleError, Stages, check, draw, drawing, simulate, spmd
from rota.compat.tessel.__main__ import main
from rota.compat.tessel.cases import PLACEMENTS, Placement
from rota.compat.tessel.schedule.composer import Composer
from rota.compat.tessel.schedule.schedplan import Block, SchedPlan, placement_of
from support.networks import batch_of, loss_fn
from support.parallel_modules import ParallelLayer
from support.pool import Pool
from support.tessel_shapes import tessel

EXAMPLE = '''
from rota.compat.tessel.schedule.schedplan import SchedPlan, Block

def vshape(ndevs: int) -> SchedPlan:
    """
    f             b
      f         b
        f     b
          f b
    """
    sched = SchedPlan(ndevs)
    fblocks = [Block(0, span=1, memory=1, btype="Forward") for _ in range(ndevs)]
    fdevs = [[devid] for devid in range(ndevs)]
    bblocks = [Block(0, span=2, memory=-1, btype="Backward") for _ in range(ndevs)]
    bdevs = [[devid] for devid in range(ndevs)][::-1]
    blocks = fblocks + bblocks
    devs = fdevs + bdevs
    sched.add_block_seq(blocks, devs)
    return sched

placement = vshape(ndevs=4)  # 4-device v-shape placement
'''
SEARCH = """
# maximal peak memory capacity for each device
memory = 4
# problem size: how many micro-batches involve in the repetend construction.
nmicros = 4
# search
schedule = Composer.compose_n(micro, memory, nmicros)
print(schedule)
"""


@cache
def composed(shape: str, memory: int | None, nmicros: int | None, train: bool = True) -> SchedPlan:
    micro = PLACEMENTS[shape](4, train=train)
    return Composer.compose(micro, memory) if nmicros is None else Composer.compose_n(micro, memory, nmicros)


def test_the_document_s_example(capsys: pytest.CaptureFixture[str]) -> None:
    """Edits: the import line; the composer's import, which the document leaves out; `micro`, which it never defines."""
    names: dict[str, object] = {}
    exec(EXAMPLE, names)
    exec("from rota.compat.tessel.schedule.composer import Composer\nmicro = placement\n" + SEARCH, names)
    schedule = names["schedule"]
    assert (schedule.period, schedule.nsteps) == (3, 3 * 3 + 12)
    assert [schedule.peak_memory(device) for device in range(4)] == [4, 3, 2, 1]
    assert capsys.readouterr().out == f"{schedule}\n"
    assert str(schedule).splitlines()[3] == (
        " --  --  -- |f0  b0--b0 |f1  b1--b1  f2  b2--b2  f3  b3--b3  --  --  --  --  --  --"
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((0, 0, 1, "forward"), "span of a block is 0; give a whole number of 1 or more"),
        ((0, 1, 0.5, "forward"), "memory of a block is 0.5; give a whole number"),
        ((0, 1, 1, "sideways"), "btype is \"sideways\"; a block is 'forward' or 'backward'"),
    ],
)
def test_blocks_that_are_refused(arguments: tuple, told: str) -> None:
    with pytest.raises(ScheduleError, match=told):
        Block(*arguments)


def test_a_sequence_with_an_empty_step() -> None:
    schedule = SchedPlan(2)
    a, b, c = Block(0, 2, 1, "forward"), Block(0, 1, 0, "forward"), Block(0, 1, -1, "backward")
    schedule.add_block_seq([a, None, b, c], [[0], None, [0, 1], [1]])
    assert (schedule.nsteps, schedule.ndevs) == (5, 2)
    assert schedule.all_blocks() == {a, b, c}
    assert schedule.chain_blocks() == [a, b, c]
    assert [schedule.step(block) for block in (a, b, c)] == [0, 3, 4]
    assert schedule.blocks(3) == (b,)
    assert schedule.blocks(1) == ()
    assert schedule.device(b) == (0, 1)
    assert schedule.device_blocks(1) == (b, c)
    assert (c.before, b.before) == ({b}, {a})
    assert str(schedule) == " f0--f0  --  f0  --\n --  --  --  f0  b0\n"
    assert (schedule.peak_memory(0), schedule.peak_memory(1)) == (1, 0)
    part = schedule.extract(3, 5)
    assert (part.step(b), part.step(c), part.nsteps) == (0, 1, 2)
    assert part.validate(complete=False)
    assert not part.validate()
    schedule.tighten()
    assert [schedule.step(block) for block in (a, b, c)] == [0, 2, 3]
    assert schedule.validate()


def test_adding_blocks() -> None:
    schedule, a = SchedPlan(2), Block(0, 3, 1, "forward")
    schedule.add_block(a, [0], 2)
    schedule.add_block(a, [0], 2)
    for step in (0, 1, 2, 4):
        with pytest.raises(ScheduleError, match=r"meets f0 at steps 2 to 4 on device 0; start it at step 5"):
            schedule.add_block(Block(1, 3, 0, "forward"), [1, 0], step)
    schedule.add_block(Block(1, 2, 0, "forward"), [1, 0], 0)
    with pytest.raises(ScheduleError, match="already is on"):
        schedule.add_block(a, [0], 7)
    with pytest.raises(ScheduleError, match="give one or more of 0 to 1, each once"):
        schedule.add_block(Block(2, 1, 0, "forward"), [2], 9)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [*(("v", "vshape"), ("x", "xshape"), ("m", "mshape"), ("nn", "nnshape")), ("nn-eager", "nnshape_eager")],
)
def test_placements_are_rota_s_shapes(ours: str, theirs: str) -> None:
    """The same tasks on the same ranks, the same edges."""
    expected, schedule = tessel(ours, 4, 6), PLACEMENTS[theirs](4)
    placement = placement_of(schedule, 6, schedule.added_blocks())
    assert set(placement.tasks) == set(expected.tasks)
    assert edges_of(placement) == edges_of(expected)


def edges_of(placement) -> set:
    return {(str(placement.tasks[edge.source]), str(placement.tasks[edge.target])) for edge in placement.edges}


@pytest.mark.parametrize("shape", PLACEMENTS)
def test_inference_forms_hold_nothing(shape: str) -> None:
    micro = PLACEMENTS[shape](4, train=False)
    assert {(block.btype, block.memory) for block in micro.all_blocks()} == {("forward", 0)}
    schedule = composed(shape, None, 2, train=False)
    assert [schedule.peak_memory(device) for device in range(4)] == [0] * 4
    assert schedule.validate()
    check(schedule.to_plan(0))


def require_sound(schedule: SchedPlan, memory: int | None) -> None:
    """In itself, and as what Rota checks and simulates."""
    assert schedule.validate()
    plan = schedule.to_plan(memory)
    check(plan)
    timeline = simulate(plan)
    assert timeline.makespan_us <= schedule.nsteps
    peaks = [schedule.peak_memory(device) for device in range(schedule.ndevs)]
    assert list(timeline.peak_memory_bytes) == peaks


@pytest.mark.parametrize(
    ("shape", "memory", "nmicros", "period", "nsteps"),
    [
        *(("vshape", 4, None, 4, 28), ("xshape", 4, 3, 8, 30), ("mshape", 6, 6, 6, 48), ("nnshape", 6, 3, 12, 40)),
        *(("nnshape_eager", 6, 3, 12, 40), ("kshape", 6, 4, 6, 28), ("finetune", 6, 3, 7, 21)),
        *(("alphafold", 6, 3, 6, 26), ("mllm", 6, 2, 13, 33)),
    ],
)
def test_compositions(shape: str, memory: int, nmicros: int | None, period: int, nsteps: int) -> None:
    schedule = composed(shape, memory, nmicros)
    assert (schedule.period, schedule.nsteps) == (period, nsteps)
    require_sound(schedule, memory)
    assert sorted(block.gid for block in schedule.repeated) == list(range(len(PLACEMENTS[shape](4).all_blocks())))


@pytest.mark.parametrize("shape", ["vshape", "xshape", "kshape", "finetune"])
def test_more_micro_batches(shape: str) -> None:
    """Each is a period longer, one by one or at once."""
    schedule = composed(shape, 6, 3)
    for nmicros in (3, 4, 9):
        unrolled = schedule.unroll(nmicros)
        assert unrolled.nsteps == schedule.nsteps + (nmicros - 3) * schedule.period
        assert {block.mid for block in unrolled.all_blocks()} == set(range(nmicros))
        require_sound(unrolled, 6)
    assert str(schedule.unroll(5).unroll(9)) == str(schedule.unroll(9))


def test_none_where_there_is_none() -> None:
    assert Composer.compose_n(Placement.vshape(4), 0, 4) is None
    assert Composer.compose(Placement.vshape(4), 0) is None
    keeps = SchedPlan(1)
    keeps.add_block(Block(0, 1, 1, "forward"), [0], 0)
    assert Composer.compose_n(keeps, 3, 2) is None


def test_placements_that_are_refused() -> None:
    with pytest.raises(ScheduleError, match="no blocks; add some"):
        Composer.compose_n(SchedPlan(2), 4, 4)
    micro, outside = SchedPlan(1), Block(0, 1, 0, "forward")
    block = Block(0, 1, 0, "forward")
    Block.make_dependency(outside, block)
    micro.add_block(block, [0], 0)
    with pytest.raises(ScheduleError, match="f0 depends on f0, which is not in the placement; add it"):
        Composer.compose_n(micro, 4, 4)


def test_a_composed_schedule_is_a_plan_that_is_drawn() -> None:
    plan = composed("vshape", 4, 6).to_plan(4)
    assert (plan.num_ranks, plan.num_stages, plan.num_microbatches) == (4, 4, 6)
    assert plan.placement.cluster.limit_bytes == (4, 4, 4, 4)
    assert " ".join(map(str, plan.orders[3][:4])) == "3F0 3B0 3F1 3B1"
    assert Plan.from_json(plan.to_json()) == plan
    assert "0 " in drawing.to_text(plan)
    assert draw(plan).get_title(loc="left").startswith("makespan 36 µs")


def test_a_schedule_by_hand_is_a_plan() -> None:
    """GPipe on two devices; `gid` says which blocks of different micro-batches are the same sub-graph."""
    schedule, steps = SchedPlan(2), count()
    for mid in range(2):
        forward, backward = (Block(mid, 1, sign, kind, gid) for gid, (sign, kind) in enumerate(FB))
        Block.make_dependency(forward, backward)
        schedule.add_block(forward, [0], next(steps))
        schedule.add_block(backward, [0], next(steps))
    assert [str(op) for op in schedule.to_plan().orders[0]] == ["0F0", "0B0", "0F1", "0B1"]
    assert [str(op) for op in Placement.vshape(2).to_plan().orders[0]] == ["0F0", "0B0"]


FB = [(1, "forward"), (-1, "backward")]


@pytest.mark.parametrize("shape", ["vshape", "kshape"])
def test_files(tmp_path: Path, shape: str) -> None:
    schedule = composed(shape, 6, 3)
    schedule.save(tmp_path / "schedule.json")
    loaded = SchedPlan.load(tmp_path / "schedule.json")
    assert str(loaded) == str(schedule)
    assert str(loaded.unroll(6)) == str(schedule.unroll(6))
    assert loaded.to_plan(6) == schedule.to_plan(6)
    Placement.mshape(4).save(tmp_path / "micro.json")
    assert str(SchedPlan.load(tmp_path / "micro.json")) == str(Placement.mshape(4))


def test_a_file_of_tessel_s_own_is_read_and_unrolled(tmp_path: Path) -> None:
    """It has neither dependencies nor a period: its repetend follows the warm-up, and is done again after its end."""
    blocks = [(0, 0, 0, "forward"), (1, 0, 1, "forward"), (0, 1, 1, "backward"), (1, 1, 2, "backward")]
    fields = {
        "ndevs": 1,
        "blocks": [
            {"mid": mid, "span": 1, "memory": 0, "btype": kind, "gid": gid, "step": step + (kind == "backward" and 1)}
            | {"device": [0]}
            for mid, gid, step, kind in blocks
        ],
        "repetend": [1, 3],
    }
    (tmp_path / "theirs.json").write_text(json.dumps(fields))
    loaded = SchedPlan.load(tmp_path / "theirs.json")
    assert str(loaded) == " f0 |f1  b0 |b1\n"
    assert str(loaded.unroll(4)) == " f0 |f1  b0  f2  b1  f3  b2 |b3\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "schedule is \\[\\]; expected an object"),
        ('{"ndevs": 2, "repetend": null}', "has no field 'blocks'"),
        ('{"ndevs": 1, "blocks": [{"mid": 0, "span": 0}], "repetend": null}', "has no field 'memory'"),
        ('{"ndevs": 1, "blocks": [], "repetend": null, "repeated": [3]}', "names block 3, but has 0 blocks"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(FormatError, match=told) as error:
        SchedPlan.load(tmp_path / "bad.json")
    assert "bad.json" in str(error.value)
    with pytest.raises(FormatError, match=r"cannot read .*none.json: No such file"):
        SchedPlan.load(tmp_path / "none.json")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mshape.json"
    options = ["--placement", "mshape", "--ndevs", "4", "--nmicros", "6", "--memory", "6", "--save"]
    assert main([*options, str(path)]) == 0
    told = capsys.readouterr().out
    assert "best schedule, 6 micro-batches in 48 steps:" in told
    assert "unrolled schedule, 8 micro-batches in 60 steps:" in told
    assert "peak memory per device: " in told
    assert "(again every 6)" in told
    loaded = SchedPlan.load(path)
    assert str(loaded) in told
    assert max(loaded.peak_memory(device) for device in range(4)) <= 6


def test_the_command_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--placement", "vshape", "--ndevs", "3", "--nmicros", "3", "--memory", "0"]) == 1
    assert "no solution" in capsys.readouterr().out
    assert main(["--placement", "vshape", "--ndevs", "2", "--save", str(tmp_path / "none" / "a.json")]) == 2
    assert "none/a.json" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--placement", "vshap", "--ndevs", "3"])


# --- schedules that Tessel's composer made run, with modules for their blocks, and give the unsplit model's gradients -


NMICROS = 3
FROZEN = {"finetune": (0,), "alphafold": (0, 1, 2, 3)}


@cache
def plan_of(shape: str, nmicros: int, train: bool = True) -> Plan:
    """On two devices; with two more micro-batches than were composed."""
    schedule = Composer.compose_n(PLACEMENTS[shape](2, train=train), 4 if train else None, nmicros)
    return schedule.unroll(nmicros + 2).to_plan(4 if train else None)


def stages_for(shape: str, plan: Plan, parallel: bool) -> Stages:
    """A module for each forward block; of X one chain alone."""
    placement = plan.placement
    on = [placement.ranks_of(stage) for stage in placement.stages[: placement.num_stages // placement.num_components]]
    groups = {ranks: spmd.group(ranks) if parallel else None for ranks in dict.fromkeys(on)}
    modules = [ParallelLayer(stage, groups[ranks]) for stage, ranks in enumerate(on)]
    for stage in FROZEN.get(shape, ()):
        modules[stage].requires_grad_(False)
    return Stages(modules, [edge for edge in placement.stage_edges if max(edge) < len(on)])


def whole(name: str, gradient: Tensor, group: spmd.Group) -> Tensor:
    """Of a layer that is dealt to ranks."""
    dims = {"up": 0, "up_bias": 0, "down": 1}
    return spmd.gather_from_ranks(gradient, group, dims[name]) if group and name in dims else gradient


def train(rank: int, plans: dict[str, Plan], batches: dict[str, Any]) -> dict[str, Any]:
    """Losses, and gradients by (stage, parameter name)."""
    found: dict[str, Any] = {}
    for shape, plan in plans.items():
        stages = stages_for(shape, plan, parallel=True)
        with Pipeline(stages, plan, loss_fn) as pipeline:
            loss = pipeline.step(*batches[shape])
            gradients = {
                (stage % len(stages), name): whole(name, parameter.grad, module.group)
                for stage, module in pipeline.local_stages.items()
                for name, parameter in module.named_parameters()
                if parameter.grad is not None
            }
            found[shape] = loss, gradients, pipeline.timeline().plan.orders == plan.orders
    return found


@pytest.fixture(scope="module")
def trained(pool: Pool) -> list[dict[str, Any]]:
    plans = {shape: plan_of(shape, NMICROS) for shape in PLACEMENTS}
    batches = {shape: batch_of(plan.num_microbatches) for shape, plan in plans.items()}
    return pool.run(2, train, plans, batches)


@pytest.mark.parametrize("shape", PLACEMENTS)
def test_gradients_are_the_unsplit_model_s(trained: list[dict[str, Any]], shape: str) -> None:
    plan = plan_of(shape, NMICROS)
    inputs, targets = batch_of(plan.num_microbatches)
    serial = stages_for(shape, plan, parallel=False)
    expected = loss_fn(serial.run(inputs), targets)
    expected.backward()
    seen: set[tuple[int, str]] = set()
    for by_shape in trained:
        loss, gradients, is_as_planned = by_shape[shape]
        assert loss == pytest.approx(expected.item(), rel=1e-10)
        assert is_as_planned
        for (stage, name), gradient in gradients.items():
            parameter = serial[stage].get_parameter(name)
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-10, atol=1e-10)
        seen |= gradients.keys()
    trainable = {
        (stage, name)
        for stage, module in enumerate(serial.modules)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    assert seen == trainable
