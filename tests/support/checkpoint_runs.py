"""Trainings that are saved and resumed on other plans, and what is in their checkpoints."""

import json
import struct
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import rota
from rota import Checkpoints, Cluster, Costs, Pipeline, Plan, Stages, interleaved, place, split, wave
from rota.runtime.environment import KEPT_MEMORY
from rota.runtime.launcher_files import states_in
from rota.schedules import interleaved_one_f_one_b, one_f_one_b, zb_h1, zb_v
from support.networks import batch_of, loss_fn

WIDTH, NUM_MICROBATCHES, NUM_LAYERS = 6, 4, 8
SCHEDULES = ("1f1b", "interleaved", "v", "zb")


class Layer(nn.Module):
    """With a buffer, so that not only weights have to be found again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.rand(()) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.scale + x


def model(seed: int = 0) -> nn.Sequential:
    """Eight layers; the first and the last share a weight."""
    torch.manual_seed(seed)
    layers = nn.Sequential(*(Layer() for _ in range(NUM_LAYERS))).double()
    layers[-1].linear.weight = layers[0].linear.weight
    return layers


@dataclass(frozen=True)
class Run:
    """How the model is trained: what a resume may change."""

    schedule: str
    num_ranks: int
    num_replicas: int = 1

    @property
    def num_processes(self) -> int:
        return self.num_ranks * self.num_replicas

    @property
    def name(self) -> str:
        return f"{self.schedule}-{self.num_ranks}x{self.num_replicas}"

    def plan(self) -> Plan:
        cluster = Cluster.uniform(self.num_ranks)
        if self.schedule == "interleaved":
            return interleaved_one_f_one_b(interleaved(Costs.uniform(2 * self.num_ranks), cluster), NUM_MICROBATCHES)
        if self.schedule == "v":
            return zb_v(wave(Costs.uniform(2 * self.num_ranks, weight_us=1), cluster), NUM_MICROBATCHES)
        if self.schedule == "zb":
            return zb_h1(place(Costs.uniform(self.num_ranks, weight_us=1), cluster), NUM_MICROBATCHES)
        return one_f_one_b(place(Costs.uniform(self.num_ranks), cluster), NUM_MICROBATCHES)

    def mesh(self) -> Any:
        return rota.mesh(pp=self.num_ranks, dp=self.num_replicas)


RUNS = [Run(schedule, n, replicas) for replicas in (1, 2) for n in (1, 2, 3, 4) for schedule in SCHEDULES]
#: Each schedule, number of ranks and number of replicas, but not in all combinations.
CORE_RUNS = [
    RUNS[0],
    Run("interleaved", 2),
    Run("v", 3),
    Run("zb", 4),
    Run("zb", 1, 2),
    Run("v", 2, 2),
    Run("1f1b", 2, 2),
]


class Halving:
    """A schedule with a state of its own, as `LambdaLR` takes it."""

    def __init__(self, every: int = 1) -> None:
        self.every = every

    def __call__(self, step: int) -> float:
        return 0.5 ** (step // self.every)


def optimizer_of(named: Iterator[tuple[str, nn.Parameter]]) -> tuple[torch.optim.Optimizer, Any]:
    """Two groups with options of their own, and a schedule of learning rates for each."""
    parameters = dict(named)
    groups = [
        {"params": [p for name, p in parameters.items() if name.endswith(kind)], **options}
        for kind, options in (("weight", {"lr": 0.02, "weight_decay": 0.1}), ("bias", {"lr": 0.05}))
    ]
    optimizer = torch.optim.AdamW(groups)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 1 / (1 + n)])


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all replicas together."""
    return batch_of(2 * NUM_MICROBATCHES, seed=step)


def train(pipeline: Pipeline, optimizer: Any, batches: Iterable[Sequence[Any]], scheduler: Any = None) -> list[float]:
    """The losses of a step on each batch."""
    losses = []
    for batch in batches:
        losses.append(pipeline.step(*batch))
        if optimizer is not None:  # the rank has weights
            optimizer.step()
            optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return losses


class Training:
    """A model in training on this process, until its end as a context."""

    def __init__(self, run: Run, stages: Stages | None = None, make_optimizer: Any = optimizer_of) -> None:
        plan = run.plan()
        self.run = run
        self.stages = stages or split(model(), plan.num_stages)
        self.pipeline = Pipeline(self.stages, plan, loss_fn, mesh=run.mesh())
        self.optimizer, self.scheduler = make_optimizer(self.pipeline.named_parameters())

    def __enter__(self) -> "Training":
        self.pipeline.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.pipeline.__exit__(*error)

    def checkpoints(self, folder: Path, **options: Any) -> Checkpoints:
        return Checkpoints(folder, self.pipeline, self.optimizer, self.scheduler, **options)

    def steps(self, steps: range) -> list[float]:
        num_replicas, replica = self.run.num_replicas, self.pipeline.replica
        batches = ([part.chunk(num_replicas)[replica] for part in batch(step)] for step in steps)
        return train(self.pipeline, self.optimizer, batches, self.scheduler)


def serial_losses(num_steps: int) -> list[float]:
    """The unsplit model's."""
    serial = model()
    optimizer, scheduler = optimizer_of(serial.named_parameters())
    losses = []
    for step in range(num_steps):
        x, target = batch(step)
        loss = loss_fn(serial(x), target)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return losses


def stored(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All tensors of a checkpoint by name, and the records of all weights; Rota's own reader takes no part."""
    tensors: dict[str, torch.Tensor] = {}
    records: dict[str, Any] = {}
    for file in sorted(path.glob("rank-*.safetensors")):
        data = file.read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        header, begin = json.loads(data[8 : 8 + length]), 8 + length
        sizes = {key: size for key, _, size, *_ in json.loads(header["__metadata__"]["tensors"])}
        offsets = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        for key, value in safetensors.torch.load(data).items():
            assert header[key]["data_offsets"][1] <= len(data) - begin
            part = tensors.setdefault(key, torch.empty(sizes[key], dtype=value.dtype))
            for dimension, offset in enumerate(offsets[key]["saved_offsets"]):
                part = part.narrow(dimension, offset, value.shape[dimension])
            part.copy_(value)
        for group in json.loads(header["__metadata__"]["training"])["groups"]:
            shared = {name: value for name, value in group.items() if name != "weights"}
            records |= {key: [shared, state] for key, state in group["weights"].items()}
    return tensors, records


TWO = Run("1f1b", 2)


def save_model(rank: int, folder: Path) -> None:
    with Training(TWO) as training:
        training.steps(range(2))
        training.checkpoints(folder).save(2)


def steps_in(folder: Path) -> list[int]:
    """The steps that are whole in a rank's memory."""
    return [step for _, step in states_in(folder)]


@contextmanager
def memory() -> Iterator[Path]:
    """A folder as a supervisor would keep it for this rank, and no other rank's."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, pytest.MonkeyPatch.context() as patch:
        own = Path(folder, "snapshots-0")
        own.mkdir()
        patch.setenv(KEPT_MEMORY, str(own))
        yield own
