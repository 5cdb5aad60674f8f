"""Whatever crosses a boundary, between ranks or on one, the gradients are the unsplit model's."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from rota import Cluster, Costs, Pipeline, PipelineError, Plan, Stages, place
from rota.schedules import NAMED
from support.fresh import run_fresh
from support.networks import (
    Layer,
    StepResult,
    assert_as_unsplit,
    assert_equal_steps,
    batch_of,
    chain,
    gradients_of,
    loss_fn,
    pipeline_steps,
    plan_for,
    refusal,
    serial_microbatches,
    serial_step,
    stages_of,
)
from support.odd_stages import IN_PLACE, Calls
from support.pool import Pool, on_ranks
from support.sampling import IS_WHOLE

WIDTH = 6
UNKNOWN_TO_NCCL = [torch.int16, torch.uint16, torch.uint32, torch.uint64]


def layer(linear: nn.Linear, *values: Tensor) -> Tensor:
    return torch.tanh(linear(sum(values)))


def make_nested(linear: nn.Linear, x: Tensor) -> Any:
    ids = (x[:, 0] > 0).long()
    plain = [None, 3, 2.5, True, "text"]
    few = [*(ids.to(dtype) for dtype in UNKNOWN_TO_NCCL), ids[0].to(torch.uint32)]
    v = {"h": (linear(x), plain), 7: ids, "shape": x.shape, "nothing": (), "mask": x > 0, "cut": linear(x).detach()}
    return v | {"few": few}


def read_nested(linear: nn.Linear, v: Any) -> Any:
    h, plain = v["h"]
    assert plain == [None, 3, 2.5, True, "text"]
    assert [type(item) for item in plain] == [type(None), int, float, bool, str]
    assert type(v["shape"]) is torch.Size
    assert (v["shape"], v["nothing"]) == (h.shape, ())
    assert [*v] == ["h", 7, "shape", "nothing", "mask", "cut", "few"]
    assert (v[7].dtype, v["mask"].dtype) == (torch.int64, torch.bool)
    assert not v["cut"].requires_grad
    *few, lone = v["few"]
    assert [ids.dtype for ids in (*few, lone)] == [*UNKNOWN_TO_NCCL, torch.uint32]
    ids = sum(ids.long() for ids in few) - 3 * v[7] + lone.long() - v[7][0]  # as it was sent
    h = h * v["mask"] + v["cut"]
    return [linear(h) * ids[:, None], (h, ids)]


def end_nested(linear: nn.Linear, v: Any) -> Tensor:
    a, (b, ids) = v
    return layer(linear, a, b) / (ids[:, None] + 1)


def make_two(linear: nn.Linear, x: Tensor) -> dict[str, Tensor]:
    return {"a": linear(x), "b": linear(x).sin(), "unused": x}


def make_pair(linear: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    return linear(x), linear(x).sin()


def make_twice(linear: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    y = linear(x)
    return y, y


def read_pair(linear: nn.Linear, pair: tuple[Tensor, Tensor]) -> Tensor:
    return layer(linear, pair[0], 2 * pair[1])


def pass_on(linear: nn.Linear, x: Any) -> Any:
    return x


def pass_on_and_add(linear: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    return x, linear(x)


def transposed(linear: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    y = linear(x)
    return y.mT, y[:, ::2].expand(2, -1, -1)


def read_transposed(linear: nn.Linear, pair: tuple[Tensor, Tensor]) -> Tensor:
    return linear(pair[0].mT) * pair[1].sum((0, 2))[:, None]


def own_parameter(linear: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    return linear(x), linear.bias


def read_first_only(linear: nn.Linear, pair: tuple[Tensor, Tensor]) -> Tensor:
    return layer(linear, pair[0])


def with_empty(linear: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    y = linear(x)
    return y, y[:0]


def read_with_empty(linear: nn.Linear, pair: tuple[Tensor, Tensor]) -> Tensor:
    assert (pair[1].shape, pair[1].requires_grad) == ((0, WIDTH), True)
    return layer(linear, pair[0]) + pair[1].sum()


def no_tensor(linear: nn.Linear, x: Tensor) -> tuple[int, None]:
    return x.shape[1], None


def read_no_tensor(linear: nn.Linear, pair: tuple[int, None], x: Tensor) -> Tensor:
    return linear(x) * pair[0]


def large(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x).repeat(1, 20_000)


def read_large(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x.unflatten(1, (-1, WIDTH)).mean(1))


CASES: dict[str, Stages] = {
    "nested": stages_of(make_nested, read_nested, end_nested),
    "keys of a dict": stages_of(make_two, layer, layer, edges=[(0, 1, "a"), (0, 2, "b"), (1, 2)]),
    "keys of a tuple": stages_of(make_pair, layer, layer, edges=[(0, 2, 1), (0, 1, 0), (1, 2)]),
    "one key twice": stages_of(make_two, layer, layer, edges=[(0, 1, "a"), (0, 2, "a"), (1, 2)]),
    "one tensor twice": stages_of(make_twice, read_pair, layer),
    "passed on": stages_of(layer, pass_on, layer),
    "input passed on": stages_of(pass_on, layer, layer),
    "a pair passed on": stages_of(make_pair, pass_on, read_pair),
    "passed on and used": stages_of(layer, pass_on_and_add, read_pair),
    "not contiguous": stages_of(transposed, read_transposed, layer),
    "a parameter": stages_of(own_parameter, read_pair, layer),
    "part not used": stages_of(make_pair, read_first_only, layer),
    "empty tensors": stages_of(with_empty, read_with_empty, layer),
    "no tensors": stages_of(no_tensor, read_no_tensor, layer, inputs=[(0,), (0,), ()]),
    "large": stages_of(large, read_large, layer),
}


PLACES = {"1f1b": [[2, 0, 1]], "gpipe": [[1, 0, 1]]}
if IS_WHOLE:
    PLACES = {"1f1b": [[0, 1, 2], [2, 0, 1]], "gpipe": [[0, 0, 1], [0, 1, 1], [1, 0, 1]]}


def plans_for(stages: Stages, num_microbatches: int = 4) -> list[Plan]:
    edges = [edge[:2] for edge in stages.edges]
    costs, cluster = Costs.uniform(3, 10, 20), Cluster.uniform(3)
    return [
        NAMED[name](place(costs, cluster, ranks, edges), num_microbatches)
        for name, choices in PLACES.items()
        for ranks in choices
    ]


@pytest.mark.parametrize("case", CASES)
def test_boundary(pool: Pool, case: str) -> None:
    stages, batches = CASES[case], [batch_of(4, seed) for seed in (1, 2)]
    assert_as_unsplit(pool, 3, [(stages, plan, batches) for plan in plans_for(stages)])


def plain(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x)


def writes(how: str, linear: nn.Linear, x: Tensor) -> Tensor:
    """Writes into what it receives."""
    return linear(IN_PLACE[how](x))


def in_place_stages(edges: list[tuple[int, int]]) -> Stages:
    return stages_of(plain, partial(writes, "relu"), layer, edges=edges)


def steps_or_error(rank: int, stages: Stages, plan: Plan, batch: Any) -> str | StepResult:
    try:
        return pipeline_steps(rank, stages, plan, [batch])[0]
    except PipelineError as error:
        return str(error)


@pytest.mark.parametrize(
    ("ranks", "others_read", "split"), [([0, 0, 0], False, True), ([0, 0, 0], True, False), ([0, 1, 0], True, True)]
)
def test_writing_into_what_is_received(pool: Pool, ranks: list[int], others_read: bool, split: bool) -> None:
    edges = [(0, 1), (1, 2), (0, 2)] if others_read else [(0, 1), (1, 2)]
    costs = Costs.uniform(3, weight_us=1 if split else None)
    plan = NAMED["gpipe"](place(costs, Cluster.uniform(max(ranks) + 1), ranks, edges), 4)
    results = pool.run(plan.num_ranks, steps_or_error, in_place_stages(edges), plan, batch_of(4))
    if others_read and ranks[1] == 0:
        assert "stage 1 writes into what it receives, which other stages read too" in results[0]
    else:
        stages = in_place_stages(edges)
        if others_read:  # on one rank they would disturb each other
            stages[1].function = relu_first
        assert_equal_steps(results, serial_step(stages, *batch_of(4)))


def relu_first(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(torch.relu(x))


def test_writing_by_functions_into_what_is_received(pool: Pool) -> None:
    """Over a message and on the same rank, in plans with B and with I and W."""
    costs = [Costs.uniform(3), Costs.uniform(3, weight_us=1)]
    plans = [NAMED["gpipe"](place(of, Cluster.uniform(2), [0, 1, 1]), 4) for of in costs]
    stages = [stages_of(plain, partial(writes, how), partial(writes, how)) for how in IN_PLACE]
    cases = [(each, plan, [batch_of(4)]) for each in stages for plan in plans]
    assert_as_unsplit(pool, 2, cases, by_microbatches=True)


@on_ranks(1)
def test_writing_behind_a_stage_that_passes_on_what_an_earlier_one_saved(rank: int) -> None:
    """On one rank, all three have one memory: autograd refuses the gradients of what was saved in it, as unsplit."""
    stages = stages_of(layer, pass_on, partial(writes, "operator"))
    for costs in (Costs.uniform(3), Costs.uniform(3, weight_us=1)):
        plan = NAMED["gpipe"](place(costs, Cluster.uniform(1), [0, 0, 0]), 4)
        with Pipeline(stages, plan, loss_fn) as pipeline:
            for _ in range(2):
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    pipeline.step(*batch_of(4))


def cuts_from_step_two_on(linear: nn.Linear, x: Tensor) -> Tensor:
    """In the first step autograd would refuse it."""
    linear.num_calls = getattr(linear, "num_calls", 0) + 1
    return linear(x.requires_grad_(linear.num_calls <= 4))


@on_ranks(1)
def test_what_is_received_keeps_its_gradient(rank: int) -> None:
    plan = NAMED["gpipe"](place(Costs.uniform(2), Cluster.uniform(1), [0, 0]), 4)
    with Pipeline(stages_of(layer, cuts_from_step_two_on), plan, loss_fn) as pipeline:
        pipeline.step(*batch_of(4))
        told = refusal(pipeline.step, *batch_of(4))
    assert "calls requires_grad_(False) on what it receives" in told


def writes_input(linear: nn.Linear, *values: Tensor) -> Tensor:
    """Writes into what it reads of the batch, behind what it receives."""
    x = values[-1]
    x *= 2
    return linear(x) + sum(values[:-1])


def reading(*inputs: list[Any]) -> Stages:
    return stages_of(writes_input, writes_input, inputs=inputs, input_names=["x", "y"])


def two_inputs() -> tuple[tuple[Tensor, Tensor], Tensor]:
    x, target = batch_of(4)
    return (x, batch_of(4, seed=2)[0]), target


def test_writing_into_an_input(pool: Pool) -> None:
    results = pool.run(2, steps_or_error, reading(["x"], ["y"]), plan_for(2, "gpipe"), two_inputs())
    assert_equal_steps(results, serial_step(reading(["x"], ["y"]), *two_inputs()))


def test_writing_into_an_input_that_is_read_again_is_refused(pool: Pool) -> None:
    plan = NAMED["gpipe"](place(Costs.uniform(2), Cluster.uniform(1), [0, 0]), 4)
    told = pool.run(1, steps_or_error, reading(["x"], ["y", 0]), plan, two_inputs())[0]
    assert "stage 0 writes into an input that other stages read too" in told
    plan = NAMED["gpipe"](place(Costs.uniform(2, recompute_us=1), Cluster.uniform(1), [0, 0]), 4)
    told = pool.run(1, steps_or_error, reading(["x"], ["y"]), plan, two_inputs())[0]
    assert "stage 0 writes into what it receives, which its recomputation needs unchanged" in told


def test_writing_into_what_is_received_and_recomputed_from_is_refused(pool: Pool) -> None:
    plan = NAMED["gpipe"](place(Costs.uniform(2, recompute_us=1), Cluster.uniform(1), [0, 0]), 4)
    told = pool.run(1, steps_or_error, stages_of(plain, partial(writes, "relu")), plan, batch_of(4))[0]
    assert "stage 1 writes into what it receives, which its recomputation needs unchanged" in told


class Model(nn.Module):
    """Returns what models of transformers return."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=self.linear(x))


class Changing(nn.Module):
    """Returns a number beside its rows, another one each time."""

    def __init__(self, numbers: list[Any]) -> None:
        super().__init__()
        self.linear, self.numbers = nn.Linear(WIDTH, WIDTH).double(), iter(numbers)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        return self.linear(x), next(self.numbers)


def first_of(_: Any, pair: tuple[Tensor, Any]) -> Tensor:
    return pair[0]


def two_steps(rank: int, first: nn.Module) -> None:
    with Pipeline(Stages([first, Calls(first_of)]), plan_for(2, "gpipe"), loss_fn) as pipeline:
        for _ in range(2):
            pipeline.step(*batch_of(4))


NUMBERS: dict[str, tuple[nn.Module, str]] = {
    "a ModelOutput": (
        Model(),
        "PipelineError: stage 0 (Model) returned a transformers.modeling_outputs.BaseModelOutput, but stages exchange "
        "tensors, tuples, lists and dicts of them, numbers, strings and None; return its .to_tuple(), or call the "
        "model with return_dict=False",
    ),
    "a number that changes": (
        Changing([1.5] * 4 + [2.5]),
        "stage 0 made (float64[5, 6] with gradient, 2.5), after (float64[5, 6] with gradient, 1.5) in an earlier step "
        "with inputs of the same shapes; return a changing number as a tensor, or use",
    ),
}


@pytest.mark.dist
@pytest.mark.parametrize("case", NUMBERS)
def test_what_does_not_cross_is_told_on_both_ranks(tmp_path: Path, case: str) -> None:
    first, message = NUMBERS[case]
    ended = run_fresh(tmp_path, 2, two_steps, first)
    assert [each.exit_code for each in ended] == [1, 1]
    assert all(message in each.stderr for each in ended)


@on_ranks(2)
def test_nan_crosses_as_the_same_number_in_every_step(rank: int) -> None:
    two_steps(rank, Changing([float("nan") for _ in range(8)]))


# --- every dtype crosses as it is, and gradients flow only as far back as somebody wants them -------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtype(pool: Pool, dtype: torch.dtype) -> None:
    stages = chain(3)
    for module in stages.modules:
        module.to(dtype)
    inputs, targets = (tensor.to(dtype) for tensor in batch_of(4))
    by_rank = pool.run(3, pipeline_steps, stages, plan_for(3), [(inputs, targets)] * 2)
    serial = serial_microbatches(stages, (inputs, targets), 4)
    for step in (0, 1):
        found = {key: value for results in by_rank for key, value in results[step].gradients.items()}
        assert {gradient.dtype for gradient in found.values()} == {dtype}
        torch.testing.assert_close(found, serial.gradients, rtol=0, atol=0)
        assert all(results[step].loss == serial.loss for results in by_rank)


class Watched(Layer):
    """Notes whether a gradient is wanted for what it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: list[bool] = []

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        self.wanted += [value.requires_grad for value in values]
        return super().forward(*values)


def freeze(stages: Stages, frozen: tuple[int, ...]) -> None:
    for stage, module in enumerate(stages.modules):
        module.requires_grad_(stage not in frozen)
        module.zero_grad(set_to_none=True)


def steps_with_frozen(rank: int, stages: Stages, plan: Plan, batch: Any, froze: list[tuple[int, ...]]) -> list[Any]:
    results = []
    with Pipeline(stages, plan, loss_fn) as pipeline:
        for frozen in froze:
            freeze(stages, frozen)
            stages[rank].wanted.clear()
            loss = pipeline.step(*batch)
            results.append((loss, gradients_of(stages, [rank]), {*stages[rank].wanted}))
    return results


def test_frozen_stages_get_no_gradients_and_those_before_them_do(pool: Pool) -> None:
    torch.manual_seed(0)
    stages, batch = Stages([Watched().double() for _ in range(3)]), batch_of(4)
    froze: list[tuple[int, ...]] = [(0,), (0,), (), (0, 1), (1,), (1, 2), (0, 1, 2), ()]
    by_rank = pool.run(3, steps_with_frozen, stages, plan_for(3), batch, froze)
    for step, frozen in enumerate(froze):
        freeze(stages, frozen)
        loss = loss_fn(stages.run(batch[0]), batch[1])
        if loss.requires_grad:
            loss.backward()
        for rank in range(3):
            of_rank, gradients, wanted = by_rank[rank][step]
            assert abs(of_rank - loss.item()) < 1e-10
            torch.testing.assert_close(gradients, gradients_of(stages, [rank]), rtol=1e-10, atol=1e-10)
            assert wanted == {any(before not in frozen for before in range(rank))}
