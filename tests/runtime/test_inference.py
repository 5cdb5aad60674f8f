"""`forward` and `evaluate` on training placements; buffers change once a micro-batch, and not in evaluation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rota import Cluster, Costs, Pipeline, PipelineError, Plan, Stages, bidirectional, interleaved, place, spmd, wave
from rota.runtime.messages import over_tensors
from rota.schedules import NAMED, chimera, gpipe
from support.networks import batch_of, chain, loss_fn, refusal
from support.parallel_modules import ParallelLayer
from support.pool import Pool, on_ranks

COSTS, CLUSTER = Costs.uniform(4), Cluster.uniform(2)
PLANS: dict[str, tuple[Plan, Any]] = {
    "chain": (NAMED["1f1b"](place(COSTS, Cluster.uniform(4)), 4), None),
    "V": (NAMED["v_half"](wave(Costs.uniform(4, weight_us=1), CLUSTER), 4), None),
    "interleaved": (NAMED["interleaved_1f1b"](interleaved(COSTS, CLUSTER), 4), None),
    "K": (gpipe(place(COSTS, CLUSTER, [0, 1, 1, (1, 0)], [(0, 3), (1, 2), (2, 3)]), 4), [(0, 3), (1, 2), (2, 3)]),
    "M": (gpipe(place(COSTS, CLUSTER, [(0, 1), 0, 1, 1]), 4), None),
    "X": (chimera(bidirectional(COSTS, Cluster.uniform(4)), 4), None),
    "forwards only": (NAMED["forward_only"](place(COSTS, Cluster.uniform(4)).forward_only(), 4), None),
}


class Stage(nn.Module):
    """A layer with dropout, shared by ranks where it has several."""

    def __init__(self, seed: int, group: spmd.Group) -> None:
        super().__init__()
        self.inner, self.dropout = ParallelLayer(seed, group), nn.Dropout(0.5)

    def forward(self, *values: Tensor) -> Tensor:
        return self.dropout(self.inner(*values))


def stages_for(plan: Plan, edges: Any, parallel: bool, kind: Callable[..., nn.Module] = Stage) -> Stages:
    on = [plan.placement.ranks_of(stage) for stage in range(4)]
    groups = {ranks: spmd.group(ranks) if parallel else None for ranks in dict.fromkeys(on)}
    return Stages([kind(stage, groups[ranks]) for stage, ranks in enumerate(on)], edges)


def infer(rank: int, plan: Plan, edges: Any, batches: list[tuple[Tensor, Tensor]], asking: set[int]) -> Any:
    """Outputs and losses, training steps between them where the plan has any; the random state after each."""
    stages = stages_for(plan, edges, parallel=True)
    found = []
    with Pipeline(stages, plan, loss_fn) as pipeline:
        stages[0].inner.eval()
        for inputs, targets in batches:
            trained = pipeline.step(inputs, targets)
            state, losses = torch.get_rng_state(), pipeline.losses
            outputs = pipeline.forward(inputs, outputs=rank in asking)
            found.append((outputs, pipeline.evaluate(inputs, targets)))
            assert torch.equal(state, torch.get_rng_state())
            assert pipeline.losses == losses
            assert trained != found[-1][1]
            pipeline.timeline()
        assert [m.training for m in stages[0].modules()] == [True, False, False, True]
        if any(op.kind != "F" for order in plan.orders for op in order):
            assert all(parameter.grad is not None for parameter in pipeline.parameters())
    return found


@pytest.mark.parametrize(("name", "asking"), [*((name, {1}) for name in PLANS), ("X", {0, 1}), ("M", set())], ids=str)
def test_outputs_in_order_on_ranks_that_ask(pool: Pool, name: str, asking: set[int]) -> None:
    plan, edges = PLANS[name]
    batches = [batch_of(4, seed) for seed in (1, 2)]
    serial = stages_for(plan, edges, parallel=False)
    for module in serial.modules:
        module.eval()
    for rank, found in enumerate(pool.run(plan.num_ranks, infer, plan, edges, batches, asking)):
        for (inputs, targets), (outputs, loss) in zip(batches, found, strict=True):
            with torch.no_grad():
                expected = serial.run(inputs)
            assert abs(loss - loss_fn(expected, targets)) < 1e-10
            assert (outputs is not None) == (rank in asking)
            if outputs is not None:
                assert len(outputs) == 4
                assert not any(output.requires_grad for output in outputs)
                torch.testing.assert_close(torch.cat(outputs), expected, rtol=1e-10, atol=1e-10)


@on_ranks(4)
def test_evaluation_needs_a_loss(rank: int) -> None:
    with Pipeline(chain(4), PLANS["forwards only"][0], None) as pipeline:
        told = refusal(pipeline.evaluate, *batch_of(4))
    assert "the pipeline has no loss_fn to evaluate; use forward for the outputs" in told


class Normed(nn.Module):
    """A layer with running statistics."""

    def __init__(self, seed: int, group: spmd.Group) -> None:
        super().__init__()
        self.inner, self.norm = ParallelLayer(seed, group), spmd.replicated(nn.BatchNorm1d(6).double())

    def forward(self, *values: Tensor) -> Tensor:
        return self.norm(self.inner(*values))


def statistics(rank: int, plan: Plan, edges: Any) -> dict[tuple[int, str], Tensor]:
    with Pipeline(stages_for(plan, edges, True, Normed), plan, loss_fn) as pipeline:
        for seed in (1, 2):
            pipeline.step(*batch_of(4, seed))
            pipeline.evaluate(*batch_of(4, seed + 10))
            pipeline.forward(batch_of(4, seed + 20)[0])
        return {(stage, name): b for stage, m in pipeline.local_stages.items() for name, b in m.named_buffers()}


@pytest.mark.parametrize(("name", "recomputed"), [("V", False), ("interleaved", True), ("K", True), ("M", False)])
def test_batch_norm(pool: Pool, name: str, recomputed: bool) -> None:
    plan, edges = PLANS[name]
    if recomputed:
        ranks = [plan.placement.ranks_of(stage) for stage in range(4)]
        plan = gpipe(place(Costs.uniform(4, recompute_us=1), CLUSTER, ranks, edges), 4)
    serial = stages_for(plan, edges, False, Normed)
    for seed in (1, 2):
        for inputs in batch_of(4, seed)[0].chunk(4):
            serial.run(inputs)
    for found in pool.run(2, statistics, plan, edges):
        for (stage, buffer), value in found.items():
            torch.testing.assert_close(value, serial[stage].get_buffer(buffer), rtol=1e-10, atol=1e-10)


class Nested(nn.Module):
    """Dtypes, shapes and structures that an output may have."""

    def forward(self, x: Tensor) -> Any:
        return {
            "x": (x.float(), x.mT, [torch.view_as_complex(torch.stack([x, -x], -1)).conj()]),
            "ids": (x > 0).long(),
            3: [None, True, 2, 0.5, float("nan"), "text", x.shape],
            "empty": x[:0].bfloat16(),
        }


class Unknown(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x, {1, 2}


def outputs_of(rank: int, last: nn.Module, asking: list[int]) -> Any:
    plan = gpipe(place(Costs.uniform(3), Cluster.uniform(3)), 4)
    stages = Stages([*chain(2).modules, last])
    with Pipeline(stages, plan, lambda output, _: output[0].sum()) as pipeline:
        try:
            outputs = pipeline.forward(batch_of(4)[0], outputs=rank in asking)
            return over_tensors(Tensor.resolve_conj, outputs)  # what comes back from here loses the bit
        except PipelineError as error:
            return str(error)


def test_nested_outputs_arrive_as_they_were(pool: Pool) -> None:
    first, middle, last = pool.run(3, outputs_of, Nested(), [0, 2])
    assert middle is None
    for here, there in zip(first, last, strict=True):
        plain, known = here.pop(3), there.pop(3)
        assert str(plain) == str(known)
        assert [*map(type, plain)] == [*map(type, known)] == [type(None), bool, int, float, float, str, torch.Size]
        torch.testing.assert_close(here, there, rtol=0, atol=0)
        assert [*here] == ["x", "ids", "empty"]
        assert here["empty"].dtype == torch.bfloat16


def test_outputs_that_cannot_travel_are_refused_where_they_are_asked_for(pool: Pool) -> None:
    words = "stage 2 (Unknown) returned a set, but stages exchange tensors"
    first, middle, last = pool.run(3, outputs_of, Unknown(), [0])
    assert words in first
    assert words in last
    assert middle is None
    *_, last = pool.run(3, outputs_of, Unknown(), [2])  # nothing has to travel
    assert last[0][1] == {1, 2}
