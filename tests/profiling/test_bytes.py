"""Predicted bytes against those that are alive while the runtime's own `Compute` runs a stage."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rota import Cluster, Costs, Kind, LayerCosts, Op, Stages, collect_losses, place, split
from rota.runtime.compute import Batch, Compute
from rota.runtime.messages import over_tensors
from rota.runtime.microbatches import Microbatches
from support.layered_models import MAKE, Case, case
from support.odd_stages import Calls
from support.profiles import profile, profile_layers


class Alive(TorchDispatchMode):
    """Counts what is alive of all tensors that operations returned, without any of the profiler's code."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Any, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self.seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def num_bytes(self) -> int:
        return sum(size for storage, size in self.seen.values() if not storage.expired())


def fresh(value: Any) -> Any:
    """As if it had come by a message."""
    return over_tensors(lambda t: t.detach().clone().requires_grad_(t.requires_grad), value)


def arriving(stages: Stages, stage: int, batch: Any) -> list[Any]:
    """What the stage reads of the others, by edge."""
    outputs: dict[int, Any] = {}
    for before in range(stage):
        values = [over_tensors(torch.clone, edge.take(outputs[edge.source])) for edge in stages.incoming(before)]
        outputs[before] = stages.call(before, values, batch)
    return [fresh(edge.take(outputs[edge.source])) for edge in stages.incoming(stage)]


def held_by_a_run(of: Case, stages: Stages, stage: int, costs: Costs) -> dict[Kind, int]:
    """Bytes alive after each op of the second micro-batch; gradients of parameters are there since the first one."""
    placement = place(costs, Cluster.uniform(len(stages)))
    compute = Compute(stages, placement, of.loss_fn)
    batch = Batch(Microbatches([of.batch] * 2), Microbatches([of.target] * 2), [0.5] * 2)
    values = arriving(stages, stage, of.batch)
    kinds = [kind for kind in (Kind.F, Kind.R, Kind.B, Kind.I, Kind.W) if placement.task(stage, kind)]
    found: dict[Kind, int] = {}
    for microbatch in range(2):
        alive = Alive()
        with alive, collect_losses() as added:
            compute.begin(batch, 0, True, added)
            for kind in kinds:
                compute.bind(Op(stage, kind, microbatch))(received(stages, stage, kind, values, of.batch))
                found[kind] = alive.num_bytes()
    return found


def received(stages: Stages, stage: int, kind: Kind, values: list[Any], batch: Any) -> list[Any]:
    if kind is Kind.F:
        return [*map(fresh, values)]
    if kind in (Kind.R, Kind.W):
        return []
    sent = stages.call(stage, over_tensors(torch.clone, values), batch)
    leaves = ([*tree_leaves(edge.take(sent))] for edge in stages.outgoing(stage))
    return [[torch.ones_like(leaf) for leaf in of_edge if isinstance(leaf, torch.Tensor)] for of_edge in leaves]


def cuts_of(layers: LayerCosts) -> Iterator[list[int]]:
    n = layers.num_layers
    yield from ([0, n], [0, n // 2, n], [0, 1, n - 1, n])


def check(name: str, of: Case, costs: Costs, stages: Stages) -> None:
    split_backward = costs.weight_us is not None
    for stage in range(len(stages)):
        found = held_by_a_run(of, stages, stage, costs)
        recomputed = costs.recompute_us is not None and costs.recompute_us[stage] is not None
        kept = costs.activation_bytes[stage]
        expected = {Kind.F: costs.checkpoint_bytes[stage] if recomputed else kept}
        if recomputed:
            expected[Kind.R] = kept
        if split_backward:
            expected |= {Kind.I: kept - costs.freed_by_input[stage], Kind.W: 0}
        else:
            expected[Kind.B] = 0
        assert found.keys() == expected.keys()
        for kind, num_bytes in expected.items():
            # What a recomputed BatchNorm keeps counts with its number of batches, of 8 bytes.
            slack = num_bytes // 100 if recomputed else 0
            assert abs(found[kind] - num_bytes) <= slack, (name, stage, kind, found, expected)


@pytest.mark.parametrize("name", MAKE)
def test_what_is_predicted_is_held(name: str) -> None:
    of = case(name)
    layers = profile_layers(of.model, of.batch, of.target, of.loss_fn, repeats=1)
    for boundaries in cuts_of(layers):
        stages = split(of.model, len(boundaries) - 1, layers.cuts_at(boundaries), example=of.batch)
        every = range(len(stages))
        for split_backward in (False, True):
            for recompute in ((), every):
                how = {"split_backward": split_backward, "recompute": recompute}
                check(name, of, layers.stages(boundaries, **how), stages)
                check(name, of, profile(stages, of.batch, of.target, of.loss_fn, repeats=1, here=True, **how), stages)


BYTES = (
    *("kept_bytes", "waiting_bytes", "changed_bytes", "received_bytes", "boundary_bytes", "boundary_gradient_bytes"),
    *("parameter_bytes", "gradient_bytes", "buffer_bytes", "optimizer_bytes", "forward_peak_bytes"),
    *("shared", "waiting_shared", "tied", "edges", "cuts"),
)


@pytest.mark.parametrize("name", MAKE)
def test_without_numbers_the_bytes_are_the_same(name: str) -> None:
    of = case(name)
    options: dict[str, Any] = {"optimizer": torch.optim.AdamW, "repeats": 1}
    real = profile_layers(*of, **options)
    on_meta = profile_layers(*of, **options, device="cpu-core")
    for column in BYTES:
        assert getattr(on_meta, column) == getattr(real, column), column
    with torch.device("meta"):
        made = MAKE[name]()
    assert profile_layers(made, *of[1:], **options, device="cpu-core") == on_meta


def test_a_weight_with_two_names_in_a_layer_is_one_without_numbers_too() -> None:
    twice = Calls(lambda s, x: s.second(s.first(x)), first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    twice.second.weight = twice.first.weight
    model = nn.Sequential(nn.Linear(4, 4), twice)
    of = Case(model, torch.ones(2, 4), torch.ones(2, 4), nn.functional.mse_loss)
    options: dict[str, Any] = {"optimizer": torch.optim.AdamW, "repeats": 1}
    real, on_meta = profile_layers(*of, **options), profile_layers(*of, **options, device="cpu-core")
    assert on_meta.parameter_bytes == real.parameter_bytes == ((16 + 4) * 4, (16 + 2 * 4) * 4)
    assert on_meta.optimizer_bytes == real.optimizer_bytes


@pytest.mark.parametrize("name", MAKE)
def test_the_most_that_a_stage_needs_is_not_underestimated_by_much(name: str) -> None:
    """Held and on top, of all stages together: sums of layers are estimates there."""
    of = case(name)
    layers = profile_layers(of.model, of.batch, of.target, of.loss_fn, repeats=1)
    for boundaries in cuts_of(layers):
        stages = split(of.model, len(boundaries) - 1, layers.cuts_at(boundaries), example=of.batch)
        for split_backward in (False, True):
            added = layers.stages(boundaries, split_backward=split_backward)
            real = profile(stages, of.batch, of.target, of.loss_fn, repeats=1, split_backward=split_backward, here=True)
            for column in ("forward_peak_bytes", "backward_peak_bytes", "weight_peak_bytes"):
                for a, b, held in zip(
                    getattr(added, column), getattr(real, column), real.activation_bytes, strict=True
                ):
                    assert held + a >= 0.9 * (held + b) - 1024, (boundaries, column, a, b)
