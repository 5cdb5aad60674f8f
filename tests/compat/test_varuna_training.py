"""The varuna door: losses, norms, evaluation and resumed trainings equal those of the unsplit model."""

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rota import Kind, Link, PipelineError, SplitError
from rota.compat.varuna import AutoConfig, CutPoint, Profiler, Varuna
from rota.compat.varuna.profiler import Profile
from rota.schedules import NAMED
from support.cut_point_models import (
    BATCH_SIZE,
    CHUNK_SIZE,
    GPT,
    MAX_NORM,
    NUM_BLOCKS,
    NUM_STEPS,
    SHARED,
    Trained,
    batch,
    optimizer_of,
    part_of,
    tied,
    train_serially,
)
from support.pages import python_blocks
from support.pool import Pool, on_ranks
from support.sampling import IS_WHOLE

TOLERANCE = 2e-6
NUM_PAIRS = (0, len(SHARED))
#: By number of processes.
LAYOUTS = {
    1: ["0;"],
    2: ["0;1;", "0,1;"],
    3: ["0;1;2;"],
    4: ["0;1;2;3;", "0,2;1,3;"],
    6: ["0,3;1,4;2,5;"],
    8: ["0,1;2,3;4,5;6,7;"],
}


def wrap(model: nn.Module, layout: str, **options: Any) -> Varuna:
    return Varuna(model, layout, batch(0, CHUNK_SIZE), BATCH_SIZE, CHUNK_SIZE, **options)


def my_part(varuna: Varuna, whole: dict[str, Any]) -> dict[str, Any]:
    return part_of(whole, varuna.pipeline.replica, varuna.num_replicas)


def steps(varuna: Varuna, optimizer: torch.optim.Optimizer, numbers: range) -> Trained:
    losses, norms, evaluated = [], [], []
    for number in numbers:
        varuna.zero_grad()
        loss, overflow, norm = varuna.step(my_part(varuna, batch(number)), clip_grad_max_norm=MAX_NORM)
        assert not overflow
        losses.append(loss)
        norms.append(norm)
        optimizer.step()
        evaluated.append(varuna.evaluate(my_part(varuna, batch(50 + number, rows=6)), batch_size=6))
    weights = {name: p.detach().clone() for name, p in varuna.named_parameters(remove_duplicate=False)}
    return Trained(losses, norms, evaluated, weights)


def train(rank: int, layout: str, num_pairs: int) -> Trained:
    """Replicas and the two of a shared pair begin with other weights than the first, which counts."""
    model = GPT(as_list=num_pairs > 0)
    others = [int(rank) for of_stage in layout.split(";") for rank in of_stage.split(",")[1:]]
    with torch.no_grad():
        for parameter in model.parameters() if rank in others else ():
            parameter.add_(rank)
    varuna = wrap(model, layout, shared_weights=SHARED[:num_pairs] or None)
    optimizer = optimizer_of(varuna.parameters())
    varuna.set_optimizer(optimizer)
    trained = steps(varuna, optimizer, range(NUM_STEPS))
    assert varuna.training
    assert varuna.get_loss_scale() == 1.0
    varuna.close()
    return trained


def trainings(rank: int, layouts: list[str]) -> list[Trained]:
    return [train(rank, layout, num_pairs) for layout in layouts for num_pairs in NUM_PAIRS]


def assert_as_serial(by_rank: list[Trained], serial: Trained, first: int = 0) -> None:
    """On every rank, from step `first` on; together they have all the weights."""
    found: set[str] = set()
    for trained in by_rank:
        for mine, wanted in zip(trained[:3], serial[:3], strict=True):
            assert mine == pytest.approx(wanted[first:], rel=TOLERANCE)
        for name, weight in trained.weights.items():
            torch.testing.assert_close(weight, serial.weights[name], rtol=1e-4, atol=2e-5)
        found |= {*trained.weights}
    assert found == {*serial.weights}


@pytest.mark.parametrize("num_processes", LAYOUTS)
def test_training_is_that_of_the_unsplit_model(pool: Pool, num_processes: int) -> None:
    """Pipelines of 1 to 4 with and without replicas, with and without shared weights."""
    by_rank = pool.run(num_processes, trainings, LAYOUTS[num_processes])
    cases = [num_pairs for _ in LAYOUTS[num_processes] for num_pairs in NUM_PAIRS]
    for case, num_pairs in enumerate(cases):
        assert_as_serial([of_rank[case] for of_rank in by_rank], train_serially(num_pairs))


HALF = NUM_STEPS // 2


def save_half_way(rank: int, folder: Path) -> Trained:
    varuna = wrap(GPT(), "0;1;", shared_weights=SHARED)
    optimizer = optimizer_of(varuna.parameters())
    with pytest.raises(PipelineError, match="call set_optimizer first"):
        varuna.checkpoint(folder)
    varuna.set_optimizer(optimizer)
    trained = steps(varuna, optimizer, range(HALF))
    varuna.checkpoint(folder)
    varuna.checkpoint(folder, step=77, tempdir="any")  # in the background
    rest = steps(varuna, optimizer, range(HALF, NUM_STEPS))
    varuna.load_checkpoint(folder, 77)
    again = steps(varuna, optimizer, range(HALF, NUM_STEPS))
    assert rest[:3] == again[:3]
    varuna.close()
    return Trained(*(a + b for a, b in zip(trained[:3], again[:3], strict=True)), again.weights)


def resume(rank: int, layout: str, folder: Path) -> Trained:
    model = GPT()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    varuna = wrap(model, layout, shared_weights=SHARED)
    optimizer = optimizer_of(varuna.parameters())
    varuna.set_optimizer(optimizer)
    with pytest.raises(PipelineError, match="no whole checkpoint of step 5"):
        varuna.load_checkpoint(folder, 5)
    varuna.load_checkpoint(folder, HALF)
    assert varuna.iteration == HALF
    trained = steps(varuna, optimizer, range(HALF, NUM_STEPS))
    assert varuna.iteration == NUM_STEPS
    varuna.close()
    return trained


def test_a_training_on_two_stages_goes_on_on_any_number(pool: Pool, tmp_path: Path) -> None:
    """The optimizer's state included, with shared weights."""
    serial = train_serially(len(SHARED))
    assert_as_serial(pool.run(2, save_half_way, tmp_path), serial)
    for layout in ("0;", "0;1;2;", "0;1;2;3;", "0,2;1,3;") if IS_WHOLE else ("0;1;2;", "0,2;1,3;"):
        assert_as_serial(pool.run(len(layout) // 2, resume, layout, tmp_path), serial, HALF)


def half_precision(rank: int, folder: Path) -> dict[str, Any]:
    """A scale that overflows until it is low enough, a fixed one, gradients that add up, and the scale of a resume."""
    varuna = wrap(GPT(), "0;1;", fp16=True, shared_weights=SHARED)
    optimizer = optimizer_of(varuna.parameters())
    with pytest.raises(PipelineError, match="with fp16, call set_optimizer before step"):
        varuna.step(batch(0))
    with pytest.raises(PipelineError, match="loss_scale is 'static'; give a number or 'dynamic'"):
        varuna.set_optimizer(optimizer, loss_scale="static")  # type: ignore[arg-type]
    varuna.set_optimizer(optimizer, init_loss_scale=2.0**32)
    before = [p.detach().clone() for p in varuna.parameters()]
    scales = [varuna.get_loss_scale()]
    loss, overflow, norm = varuna.step(batch(0), MAX_NORM)
    assert (overflow, math.isfinite(norm)) == (True, False)
    optimizer.step()
    assert all(torch.equal(p, was) for p, was in zip(varuna.parameters(), before, strict=True))
    while overflow:
        scales.append(varuna.get_loss_scale())
        varuna.zero_grad()
        loss, overflow, norm = varuna.step(batch(0), MAX_NORM)
    assert scales[:2] == [2.0**32, 2.0**31]
    varuna.checkpoint(folder)
    varuna.set_optimizer(optimizer, loss_scale=8.0)
    assert varuna.get_loss_scale() == 8.0
    varuna.zero_grad()
    _, _, once = varuna.step(batch(0))
    _, _, twice = varuna.step(batch(0))  # added to what is there
    assert varuna.get_loss_scale() == 8.0
    varuna.load_checkpoint(folder, varuna.iteration - 2)
    resumed = varuna.get_loss_scale()
    varuna.set_optimizer(optimizer, init_loss_scale=2.0**40, min_loss_scale=2.0**40)
    assert varuna.step(batch(0))[1]
    assert varuna.get_loss_scale() == 2.0**40
    varuna.close()
    without_weights(rank, folder / "more")
    return {"loss": loss, "norm": norm, "once": once, "twice": twice, "scales": (scales[-1], resumed)}


class LossAlone(nn.Module):
    """The last stage has no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.point = nn.Linear(4, 4), CutPoint()

    def forward(self, x: Any) -> Any:
        return self.point(self.layer(x)).tanh().square().mean()


def without_weights(rank: int, folder: Path) -> None:
    x = {"x": torch.ones(4, 4)}
    varuna = Varuna(LossAlone(), "0;1;", x, 4, 2, fp16=True)
    parameters = [*varuna.parameters()]
    varuna.set_optimizer(optimizer_of(parameters) if parameters else None)
    assert bool(parameters) == (rank == 0)
    told = [varuna.step(x)[1:] for _ in range(8)]
    assert told[0] == (True, math.inf)
    assert not told[-1][0]
    assert 0 < told[-1][1] < math.inf
    varuna.checkpoint(folder)
    varuna.load_checkpoint(folder, varuna.iteration)
    varuna.close()


def test_fp16(pool: Pool, tmp_path: Path) -> None:
    one, other = pool.run(2, half_precision, tmp_path)
    assert one == other
    serial = train_serially(len(SHARED), num_steps=1)
    assert one["loss"] == pytest.approx(serial.losses[0], rel=2e-3)
    assert one["norm"] == pytest.approx(serial.norms[0], rel=1e-2)
    assert one["once"] == pytest.approx(serial.norms[0], rel=1e-2)
    assert one["twice"] == pytest.approx(2 * one["once"], rel=1e-3)
    assert one["scales"][0] == one["scales"][1] > 1


@on_ranks(2)
def test_refusals_names_profile_and_choice(rank: int, tmp_path: Path) -> None:
    """What else there is, on two stages."""
    for layout, told in (("0;1;2;", "there are 2 processes; name each once"), ("1;0;", "list them in ascending order")):
        with pytest.raises(PipelineError, match=told):
            wrap(GPT(), layout)
    with pytest.raises(PipelineError, match="divides by the 2 replicas"):
        Varuna(GPT(), "0,1;", batch(0, 2), 7, CHUNK_SIZE)
    with pytest.raises(SplitError, match="did you mean 'lm_head_weight'"):
        wrap(GPT(), "0;1;", shared_weights=[("position.weight", "lm_head_weigth")])

    sizes: list[int] = []

    def get_batch_fn(size: int, device: Any = None) -> dict[str, Any]:
        sizes.append(size)
        return batch(0, size)

    model = GPT(dropout=0.5)
    state = torch.get_rng_state()
    varuna = Varuna(model, "0;1;", get_batch_fn, 10, 4, False, -1, rank, shared_weights=SHARED)
    assert sizes == [4]
    assert torch.equal(torch.get_rng_state(), state)
    plan = varuna.pipeline.plan
    assert plan.num_microbatches == 3
    assert plan.orders == NAMED["varuna"](plan.placement, 3).orders
    assert [{op.kind for op in order} for order in plan.orders] == [{Kind.F, Kind.R, Kind.B}, {Kind.F, Kind.B}]
    # Two micro-batches of 4 and a last one of 2: as all ten at once.
    model = tied(GPT(), len(SHARED)).eval()
    varuna.eval()
    assert not varuna.model.training
    loss, _, norm = varuna.step(batch(0, 10))
    wanted = model(**batch(0, 10))
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), rel=TOLERANCE)
    assert norm == pytest.approx(nn.utils.clip_grad_norm_(model.parameters(), math.inf).item(), rel=TOLERANCE)
    assert varuna.evaluate(batch(0, 10)) == pytest.approx(wanted.item(), rel=TOLERANCE)
    # Only this stage's weights are there; the whole model's names.
    mine = {name for name, _ in varuna.named_parameters()}
    assert ("final.weight" in mine) == (rank == 1)
    assert {p.device.type for p in varuna.parameters()} == {"cpu"}
    elsewhere = [p for p in varuna.stages[1 - rank].parameters() if p not in {*varuna.parameters()}]
    assert elsewhere
    assert {p.device.type for p in elsewhere} == {"meta"}
    for inputs, told in (
        (batch(0, 9), r"inputs\['ids'\] has 9 rows, but a replica's part of the batch has 10"),
        ({**batch(0, 10), "idx": 1}, "inputs has 'idx', which the model's forward does not take"),
        ([1], "inputs is a list; give a dictionary"),
    ):
        with pytest.raises(PipelineError, match=told):
            varuna.step(inputs)  # type: ignore[arg-type]
    assert varuna.to("cpu") is varuna
    with pytest.raises(PipelineError, match="leave to"):
        varuna.to("cuda:0")
    varuna.close()

    model = GPT()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    profiler = Profiler(model, get_batch_fn, out_folder=tmp_path)
    costs = profiler.profile_all([1, 2])
    assert {size: of.num_stages for size, of in costs.items()} == {1: NUM_BLOCKS + 1, 2: NUM_BLOCKS + 1}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    dist.barrier()
    profile = Profile.load(tmp_path)
    assert profile.costs == costs
    assert profile.link == profile.long_link != Link()
    assert profile.link.bytes_per_us
    found = AutoConfig(2, 2, 8, profile_folder=tmp_path, verbose=False)
    assert {*found.batch_times} == {1, 2}
    num_stages, chunk_size, seconds = found.get_min()
    assert seconds == found.batch_times[num_stages] == min(found.batch_times.values())
    assert chunk_size in (1, 2)
    given = Varuna(GPT(), "0;1;", get_batch_fn, 8, chunk_size, costs=costs[chunk_size])
    assert math.isfinite(given.step(batch(0, 8))[0])
    given.close()
    with pytest.raises(PipelineError, match=r"get_batch\(3\) returned 2 examples"):
        Profiler(GPT(), lambda size: batch(0, 2), out_folder=tmp_path).profile_all([3])


@on_ranks(2)
def test_evaluating_batches_of_many_sizes_leaves_nothing_behind(rank: int) -> None:
    """Threads and process groups after each of some evaluations, and a step after them."""
    model = tied(GPT(), len(SHARED)).eval()
    sizes = (2, 4, 6, 10, 14, 2, BATCH_SIZE)
    expected = [model(**batch(0, size)).item() for size in sizes]
    varuna = wrap(GPT(), "0;1;", shared_weights=SHARED).eval()
    left, losses = [], []
    for size in sizes:
        losses.append(varuna.evaluate(batch(0, size), batch_size=size))
        groups = len(dist.distributed_c10d._world.pg_map)
        left.append((threading.active_count(), groups))
    loss, _, _ = varuna.step(batch(0))
    varuna.close()
    assert len({*left}) == 1, left
    assert losses == pytest.approx(expected, rel=TOLERANCE)
    assert loss == pytest.approx(expected[-1], rel=TOLERANCE)


def run_example(rank: int, folder: Path, example: str) -> tuple[float, float]:
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(example.replace('"checkpoints"', repr(str(folder))), "example", "exec"), names)
    return names["loss"], names["norm"]


def test_the_example_of_the_docs(pool: Pool, tmp_path: Path) -> None:
    (example,) = python_blocks("coming-from-earlier-systems.md#Varuna")
    one, other = pool.run(2, run_example, tmp_path, example)
    assert one == other
    assert 0 < one[0] < 4
    assert one[1] > 0
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-3"]
