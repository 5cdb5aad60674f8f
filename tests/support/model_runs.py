"""Unmodified models, trained whole and in stages on several processes, and how far the two are apart.

The whole model is trained on the same micro-batches, one after another: that is what a pipeline does too, and what
counts where rows of a micro-batch mix, as in BatchNorm and in contrastive losses.
"""

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import rota
from rota import Checkpoints, Cluster, Costs, Kind, Pipeline, Plan, Stages, bidirectional, find_plan, place, split, wave
from rota.models.unmodified import matching
from rota.schedules import chimera, one_f_one_b, zb_v
from support.hf_models import CASES, ModelCase
from support.random_plans import random_chain_plan

NUM_MICROBATCHES = 4
SHAPES = ((8, 8), (12, 11), (8, 6))  # rows and length of the batch of each step
LEARNING_RATE = 1e-3
PLANS = ("1f1b", "searched", "zb_v", "bidirectional", "random")


def make_plan(name: str, num_ranks: int, seed: int = 0) -> Plan:
    """A plan for a chain of stages with random times, by the name of its schedule."""
    cluster = Cluster.uniform(num_ranks, latency_us=3)
    if name == "1f1b":
        return one_f_one_b(place(uneven(num_ranks, seed), cluster), NUM_MICROBATCHES)
    if name == "searched":
        placement = place(uneven(num_ranks, seed, in_two=True), cluster)
        found = find_plan(placement, NUM_MICROBATCHES, time_limit_s=0.02, deterministic=True)
        return found.plan
    if name == "zb_v":
        return zb_v(wave(uneven(2 * num_ranks, seed, in_two=True), cluster), NUM_MICROBATCHES)
    if name == "bidirectional":
        return chimera(bidirectional(uneven(num_ranks, seed), cluster), NUM_MICROBATCHES)
    return random_chain_plan(seed, num_ranks, 2 * num_ranks, NUM_MICROBATCHES)


def uneven(num_stages: int, seed: int, *, in_two: bool = False) -> Costs:
    """Costs of a chain; `in_two`: with a backward of I and W."""
    rng = random.Random(seed)
    forward, backward, weight = ([rng.randint(5, 15) for _ in range(num_stages)] for _ in range(3))
    return Costs(tuple(forward), tuple(backward), tuple(weight) if in_two else None)


def forwards_rise(plan: Plan) -> bool:
    """Whether every stage runs the forwards of its micro-batches in their order."""
    seen: dict[int, int] = {}
    for op in (op for order in plan.orders for op in order if op.kind is Kind.F):
        if seen.get(op.stage, -1) > op.microbatch:
            return False
        seen[op.stage] = op.microbatch
    return True


@dataclass
class Step:
    """What a training step leaves."""

    loss: float
    gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


@dataclass
class Whole:
    """Three steps of the unsplit model, and its loss and outputs in evaluation after them, by micro-batch."""

    steps: list[Step] = field(default_factory=list)
    evaluated: float = 0.0
    outputs: list[list[Tensor]] = field(default_factory=list)


def batch_of(case: ModelCase, step: int, replica: int = 0) -> dict[str, Any]:
    """The batch of a replica in a step."""
    rows, length = SHAPES[step]
    return case.make_batch(rows, length, 10 * replica + step + 1)


def microbatches(case: ModelCase, batch: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Each with its targets."""
    targets = case.make_targets(batch).chunk(NUM_MICROBATCHES)
    for m in range(NUM_MICROBATCHES):
        yield (
            {
                name: value.chunk(NUM_MICROBATCHES)[m] if isinstance(value, Tensor) else value
                for name, value in batch.items()
            },
            targets[m],
        )


def train_whole(case: ModelCase, num_blocks: int | None, num_replicas: int = 1) -> Whole:
    """The unsplit model trained on the micro-batches of all replicas, each with the same weight."""
    model, whole = case.make_model(num_blocks=num_blocks), Whole()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for step in range(len(SHAPES)):
        optimizer.zero_grad()
        total = 0.0
        for replica in range(num_replicas):
            for inputs, targets in microbatches(case, batch_of(case, step, replica)):
                loss = case.loss_fn(model(**inputs), targets) / (NUM_MICROBATCHES * num_replicas)
                loss.backward()
                total += loss.item()
        gradients = {name: copied(parameter.grad) for name, parameter in model.named_parameters()}
        optimizer.step()
        whole.steps.append(
            Step(
                total,
                gradients,
                {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
                {name: buffer.clone() for name, buffer in model.named_buffers()},
            )
        )
    with torch.no_grad():
        model.eval()
        for inputs, targets in microbatches(case, batch_of(case, 0)):
            output = model(**inputs)
            whole.evaluated += case.loss_fn(output, targets).item() / NUM_MICROBATCHES
            whole.outputs.append(tensors_in(output))
    return whole


def copied(tensor: Tensor | None) -> Tensor | None:
    """A copy that later steps leave as it is."""
    return None if tensor is None else tensor.clone()


def tensors_in(output: Any) -> list[Tensor]:
    """The tensors of an output, without those inside a cache."""
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, Mapping) else output
    if not isinstance(output, Mapping | tuple | list):
        return []
    return [tensor for value in values for tensor in tensors_in(value)]


class Differences(defaultdict[str, float]):
    """The greatest one seen of each thing that is compared; infinite where one side is missing or no number."""

    def __init__(self) -> None:
        super().__init__(float)

    def note(self, what: str, found: Tensor | float | None, expected: Tensor | float | None) -> None:
        """Compare two values."""
        if found is None and expected is None:
            return
        if found is None or expected is None:
            self[what] = float("inf")
            return
        found, expected = torch.as_tensor(found), torch.as_tensor(expected)
        if hasattr(found, "full_tensor"):
            found = found.full_tensor()
        same = found.shape == expected.shape and bool((found.isfinite() | (found == expected)).all())
        apart = torch.where(found == expected, 0.0, (found - expected).abs()).max().item() if same else float("inf")
        self[what] = max(self[what], apart)


@dataclass(frozen=True)
class Run:
    """A plan by its name, and how the stages are run: plain, recomputed, compiled or fsdp."""

    plan: Plan
    how: str = "plain"


def make_stages(case: ModelCase, num_blocks: int | None, run: Run, seed: int = 0) -> tuple[Stages, list[str]]:
    """The model in the stages of a plan, its blocks compiled if asked; and where its blocks are."""
    model = case.make_model(seed, num_blocks)
    blocks = matching(model, case.cuts)
    if run.how == "compiled":
        for path in blocks:
            model.get_submodule(path).compile(backend="aot_eager")
    return split(model, run.plan.num_stages, case.cuts, example=case.make_batch(2, 8, 0)), blocks


def wrapped(stages: Stages, blocks: Sequence[str], how: str, mesh: Any) -> Stages:
    """With each of the blocks on this rank sharded, if `how` says so."""
    stage = mesh["pp"].get_local_rank()
    if how == "fsdp":
        own = dict(stages[stage].named_modules())
        for path in blocks:
            if path in own and any(True for _ in own[path].parameters()):
                fully_shard(own[path], mesh=mesh["dp"])
    return stages


def compare_step(found: Differences, pipeline: Pipeline, loss: float, optimizer: Any, expected: Step) -> None:
    """Loss and gradients; then the optimizer's step, and the parameters."""
    found.note("loss", loss, expected.loss)
    named = {name.removeprefix("module."): parameter for name, parameter in pipeline.named_parameters()}
    for name, parameter in named.items():
        found.note("gradients", parameter.grad, expected.gradients[name])
    optimizer.step()
    for name, parameter in named.items():
        found.note("parameters", parameter.detach(), expected.parameters[name])
    optimizer.zero_grad()


def compare_buffers(found: Differences, pipeline: Pipeline, expected: Step) -> None:
    """Those of this rank's stages."""
    for module in pipeline.local_stages.values():
        for name, buffer in module.named_buffers():
            found.note("buffers", buffer, expected.buffers[name])


def compare_evaluation(found: Differences, pipeline: Pipeline, case: ModelCase, whole: Whole) -> None:
    """Loss and outputs in evaluation."""
    batch = batch_of(case, 0)
    found.note("evaluated", pipeline.evaluate(batch, case.make_targets(batch)), whole.evaluated)
    outputs = pipeline.forward(batch, outputs=pipeline.reads_targets)
    for output, expected in zip(outputs or (), whole.outputs, strict=outputs is not None):
        for one, other in zip(tensors_in(output), expected, strict=True):
            found.note("outputs", one, other)


def train(case: ModelCase, num_blocks: int | None, run: Run, whole: Whole) -> tuple[Differences, set[str]]:
    """Three steps of the stages on this rank, compared with the whole model's; and the parameters compared."""
    found = Differences()
    num_replicas = torch.distributed.get_world_size() // run.plan.num_ranks
    mesh = rota.mesh(pp=run.plan.num_ranks, dp=num_replicas) if num_replicas > 1 else None
    stages, blocks = make_stages(case, num_blocks, run)
    if mesh is not None:
        stages = wrapped(stages, blocks, run.how, mesh)
    recompute = "full" if run.how == "recomputed" else "none"
    with Pipeline(stages, run.plan, case.loss_fn, mesh=mesh, recompute=recompute) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=LEARNING_RATE)
        for step, expected in enumerate(whole.steps):
            batch = batch_of(case, step, pipeline.replica)
            loss = pipeline.step(batch, case.make_targets(batch))
            compare_step(found, pipeline, loss, optimizer, expected)
        if mesh is None and (forwards_rise(run.plan) or not changes_buffers(whole)):
            compare_buffers(found, pipeline, whole.steps[-1])
            compare_evaluation(found, pipeline, case, whole)
        return found, {name for name, _ in pipeline.named_parameters()}


def changes_buffers(whole: Whole) -> bool:
    """Whether training writes to buffers, as BatchNorm does: then the order of forwards counts, and replicas differ."""
    first, last = whole.steps[0].buffers, whole.steps[-1].buffers
    return any(not torch.equal(first[name], last[name]) for name in first)


def differences(rank: int, name: str, runs: dict[str, Run], num_blocks: int | None = None) -> dict[str, Any]:
    """For each run the differences on this rank; under "parameters" the names of those that were compared."""
    torch.set_num_threads(1)
    case, num_ranks = CASES[name], next(iter(runs.values())).plan.num_ranks
    whole = train_whole(case, num_blocks, torch.distributed.get_world_size() // num_ranks)
    result: dict[str, Any] = {}
    for label, run in runs.items():
        found, names = train(case, num_blocks, run, whole)
        result[label] = dict(found), names
    assert result, rank
    return result


def resumed(rank: int, name: str, before: Plan, after: Plan, folder: Path) -> dict[str, float]:
    """Two steps with one plan, a checkpoint, and the third with another plan, from other weights: the differences."""
    torch.set_num_threads(1)
    case, found = CASES[name], Differences()
    whole = train_whole(case, None)
    for seed, plan, steps in ((0, before, range(2)), (1, after, range(2, 3))):
        stages, _ = make_stages(case, None, Run(plan), seed)
        with Pipeline(stages, plan, case.loss_fn) as pipeline:
            optimizer = torch.optim.AdamW(pipeline.parameters(), lr=LEARNING_RATE)
            checkpoints = Checkpoints(folder, pipeline, optimizer)
            loaded = checkpoints.load()
            assert (loaded and loaded.step) == (2 if steps.start else None), rank
            for step in steps:
                batch = batch_of(case, step)
                loss = pipeline.step(batch, case.make_targets(batch))
                compare_step(found, pipeline, loss, optimizer, whole.steps[step])
            if not steps.start:
                checkpoints.save(steps.stop)
            compare_buffers(found, pipeline, whole.steps[steps.stop - 1])
    return dict(found)
