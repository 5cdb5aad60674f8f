"""What no micro-batch uses has no gradient, and neither have the weights that made it, as in the unsplit model."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import rota
from rota import Cluster, Costs, Pipeline, PipelineError, Plan, Stages, place
from rota.schedules import NAMED
from support.networks import ROWS, WIDTH, assert_as_unsplit, batch_of, clear, loss_fn, serial_microbatches
from support.odd_stages import Calls
from support.pool import Pool
from support.random_plans import random_plan
from support.sampling import some

NEVER, SOMETIMES, ALWAYS = "never", "sometimes", "always"


class Branches(nn.Module):
    """Three values by layers of their own, of which the readers use some, never or for some micro-batches only.

    A micro-batch is told by the number in the first column, which goes along as a fourth value.
    """

    def __init__(self, uses: list[tuple[str, str, str]]) -> None:
        super().__init__()
        self.uses = uses
        self.own, self.hidden, *_ = self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, *values: Any) -> Any:
        if isinstance(values[0], Tensor):
            number, total = values[0][:1, :1].detach(), self.own(values[0])
        else:
            number, total = values[0][3], self.own.bias * 2
            for value, uses in zip(values, self.uses, strict=True):
                for part, use in zip(value[:3], uses, strict=True):
                    if use == ALWAYS or (use == SOMETIMES and number > 0):
                        total = total + part
        if not self.uses or self.uses[0][0] != NEVER:
            passed = torch.tanh(self.hidden(total))
        else:  # some values are passed on as they are
            passed = values[0][1] if values and not isinstance(values[0], Tensor) else total
        return passed, self.layers[2](total), torch.sin(self.layers[3](total)), number


class Last(Branches):
    """Its output makes the loss."""

    def forward(self, *values: Any) -> Tensor:
        passed, second, *_ = super().forward(*values)
        return second + (passed if self.uses and self.uses[0][2] == ALWAYS else 0)


def random_branches(num_stages: int, edges: list[tuple[int, int]], seed: int) -> Stages:
    rng = random.Random(f"uses {seed}")
    torch.manual_seed(seed)
    modules = []
    for stage in range(num_stages):
        num_values = sum(target == stage for _, target in edges)
        uses = [tuple(rng.choices([NEVER, SOMETIMES, ALWAYS], [3, 2, 2], k=3)) for _ in range(num_values)]
        is_last = all(source != stage for source, _ in edges)
        modules.append((Last if is_last else Branches)(uses).double())  # type: ignore[arg-type]
    return Stages(modules, edges)


def numbered(num_microbatches: int, seed: int, used: list[bool]) -> tuple[Tensor, Tensor]:
    """A batch whose first column says which micro-batches use what is used sometimes."""
    x, target = batch_of(num_microbatches, seed)
    x.view(num_microbatches, ROWS, WIDTH)[:, :, 0] = torch.tensor([[1.0 if use else -1.0] for use in used])
    return x, target


def run_and_compare(pool: Any, num_ranks: int, seeds: range) -> None:
    """In every other case, each step uses other values; else all steps use the same."""
    for changes in (False, True):
        cases = [graph_case(seed, num_ranks) for seed in seeds if seed % 2 == changes]
        assert_as_unsplit(pool, num_ranks, cases, by_microbatches=True, dynamic_shapes=changes)


def drawn_uses(rng: random.Random, num_microbatches: int) -> list[bool]:
    chance = rng.choice([0, 0.5, 1])
    return [rng.random() < chance for _ in range(num_microbatches)]


def graph_case(seed: int, num_ranks: int) -> tuple[Stages, Plan, list[Any]]:
    rng = random.Random(f"steps {seed}")
    edges, plan = random_plan(seed, num_ranks)
    n = plan.num_microbatches
    uses, changes = drawn_uses(rng, n), seed % 2 == 1
    batches = [numbered(n, step, drawn_uses(rng, n) if changes else uses) for step in range(3)]
    return random_branches(plan.num_stages, edges, seed), plan, batches


def test_random_graphs(pool: Pool) -> None:
    run_and_compare(pool, 3, range(some(48)))


def use_some(stage: Any, pair: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    """Uses the second value if the first element of its first micro-batch says so."""
    return stage.c(pair[0] + pair[1] if x[0, 0] > 0 else pair[0])


def two_stages() -> Stages:
    torch.manual_seed(0)
    two = Calls(lambda s, x: (s.a(x), s.b(x)), a=nn.Linear(WIDTH, WIDTH), b=nn.Linear(WIDTH, WIDTH))
    return Stages([two.double(), Calls(use_some, c=nn.Linear(WIDTH, WIDTH)).double()], inputs=[(0,), (0,)])


def plan_on(num_ranks: int, num_microbatches: int = 2) -> Plan:
    return NAMED["gpipe"](place(Costs.uniform(2), Cluster.uniform(num_ranks), [0, num_ranks - 1]), num_microbatches)


def some_steps(rank: int, used: list[list[bool]], dynamic_shapes: bool) -> list[Any]:
    """By step the names of the weights of this rank without a gradient, or the error."""
    stages, found = two_stages(), []
    with Pipeline(stages, plan_on(2), loss_fn, dynamic_shapes=dynamic_shapes) as pipeline:
        for step, uses in enumerate(used):
            clear(pipeline)
            try:
                pipeline.step(*numbered(2, step, uses))
            except PipelineError as error:
                return [*found, str(error)]
            found.append([name for name, parameter in pipeline.named_parameters() if parameter.grad is None])
    return found


NONE = ["b.weight", "b.bias"]


def test_a_value_that_is_used_from_a_later_step_on(pool: Pool) -> None:
    used = [[False, False], [True, False], [False, False], [False, True]]
    assert pool.run(2, some_steps, used, False)[0] == [NONE, [], NONE, []]


def test_a_value_that_only_some_microbatches_of_a_later_step_use(pool: Pool) -> None:
    assert pool.run(2, some_steps, [[True, True], [True, False], [False, True]], False)[0] == [[], [], []]


def test_a_value_that_is_not_used_any_more(pool: Pool) -> None:
    """Only the rank that does not use it knows."""
    used = [[True, True], [False, False]]
    error = pool.run(2, some_steps, used, False)[1][-1]
    assert "what stage 0 sends to stage 1 got no gradient in any micro-batch of this step" in error
    assert pool.run(2, some_steps, used, True)[0] == [[], NONE]


def trained(rank: int, num_ranks: int, dp: int, shards: bool) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and norms after steps of AdamW, whose decay changes what has gradients of zeros."""
    mesh, stages = rota.mesh(pp=num_ranks, dp=dp), two_stages()
    if shards:
        # Not the second, as FSDP itself gives zeros for what a module does not use of its inputs.
        stages = stages.with_modules([fully_shard(stages[0], mesh=mesh["dp"]), stages[1]])
    with Pipeline(stages, plan_on(num_ranks), loss_fn, mesh=mesh) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.1, weight_decay=0.5)
        norms = []
        for step in range(3):
            batch = [part.chunk(dp)[pipeline.replica] for part in mesh_batch(step, dp, shards)]
            pipeline.step(*batch)
            norms.append(pipeline.clip_grad_norm_(0.1).item())
            optimizer.step()
            optimizer.zero_grad()
        return {name: whole(parameter.detach()) for name, parameter in pipeline.named_parameters()}, norms


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def mesh_batch(step: int, dp: int, shards: bool) -> tuple[Tensor, Tensor]:
    """With whole replicas, the last one alone uses the second value, in its last micro-batch."""
    return numbered(2 * dp, step, [False] * (2 * dp - 1) + [dp > 1 and not shards])


@pytest.mark.parametrize(
    ("num_ranks", "dp", "shards"),
    [(1, 1, False), (2, 1, False), (2, 2, False), (2, 2, True)],
    ids=["one rank", "two ranks", "replicas", "fsdp"],
)
def test_training_with_weight_decay(pool: Pool, num_ranks: int, dp: int, shards: bool) -> None:
    if shards:
        pool.renew()
    stages = two_stages()
    model = nn.ModuleList(stages.modules)
    before = stages[0].b.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    norms = []
    for step in range(3):
        serial_microbatches(stages, mesh_batch(step, dp, shards), 2 * dp)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
    expected = stages[0].state_dict() | stages[1].state_dict()
    assert torch.equal(expected["b.weight"], before) == (dp == 1 or shards)
    for weights, of_rank in pool.run(num_ranks * dp, trained, num_ranks, dp, shards):
        assert of_rank == pytest.approx(norms, rel=1e-10)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-10, atol=1e-10)


def test_verify_compares_none_with_none() -> None:
    """A stage made by hand that gives zeros where the unsplit model has no gradient."""
    stages = two_stages()
    stages.unsplit = Calls(lambda s, x: s.second(s.first(x), x), first=stages[0], second=stages[1])
    batch = numbered(4, 0, [False] * 4)
    assert rota.verify(stages, *batch, loss_fn=loss_fn, num_microbatches=2).exact
    zeros = Calls(lambda s, pair, _: s.c(pair[0] + 0 * pair[1]), c=stages[1].c)
    found = rota.verify(stages.with_modules([stages[0], zeros]), *batch, loss_fn=loss_fn, num_microbatches=2)
    assert not found.exact
    assert "a gradient in stage 0, but none in the unsplit model" in found.to_text()
