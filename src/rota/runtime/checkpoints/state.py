"""What a rank saves and restores: tensors by name, and all other state of the training as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import msgspec
import torch
from torch.optim import Optimizer

from rota.core.errors import PipelineError
from rota.core.reading import Field
from rota.runtime.checkpoints.optimizer_state import (
    Record,
    SavedScheduler,
    different,
    is_tensor_key,
    read_records,
    records_of,
    require_records,
    restore_optimizer,
    same,
    scheduler_state,
    split_scheduler,
    tensor_key,
)
from rota.runtime.checkpoints.random_states import (
    RandomState,
    random_state,
    read_random_state,
    require_random_state,
    set_random_state,
)
from rota.runtime.checkpoints.rank_file import Chunk, Tensors
from rota.runtime.checkpoints.values import from_json, require_readable, to_json
from rota.runtime.checkpoints.weights import Weight, Weights, few, model_key
from rota.runtime.reducing.norms import local


class TrainingState(NamedTuple):
    """All state of a training besides tensors; `records` are by weight."""

    records: dict[str, Record]
    scheduler: SavedScheduler | None
    random: RandomState

    @classmethod
    def from_json(cls, field: Field) -> TrainingState:
        """The state with this JSON, in which every field is checked. Raises FormatError that names the field."""
        field.refuse_others(cls._fields)
        if (scheduler := from_json(field["scheduler"])) is not None:
            scheduler = Field(f"{field.path}.scheduler", scheduler).read(SavedScheduler)
        return cls(read_records(field["records"]), scheduler, read_random_state(field["random"]))


@dataclass(frozen=True, slots=True)
class Trained:
    """What training changes on this rank, whose stages are on `device`: all that is saved."""

    weights: Weights
    optimizer: Optimizer | None
    scheduler: Any
    device: torch.device

    def collect(self, with_buffers: bool) -> tuple[Tensors, dict[str, Any]]:
        """This rank's tensors, not copied, and all other state as JSON; only the first replica saves buffers.

        Raises PipelineError if some of it could not be restored.
        """
        tensors: Tensors = {}
        keys: dict[torch.Tensor, str] = {}
        num_tp_shards: dict[str, int] = {}
        for weight, tp_shard in self.weights.local():
            keys[weight.tensor] = key = weight.key(weight.names[0], tp_shard)
            num_tp_shards[weight.names[0]] = weight.num_tp_shards
            if with_buffers or not weight.is_buffer:
                tensors[model_key(key)] = weight.tensor.detach()
        training = {"records": [], "scheduler": None, "random": msgspec.to_builtins(random_state(self.device))}
        if self.optimizer is not None:
            saved, by_group = split_scheduler(self.scheduler, len(self.optimizer.param_groups))
            if saved is not None:
                training["scheduler"] = to_json(msgspec.structs.asdict(saved), "the scheduler's state")
            training["records"], states = records_of(self.optimizer, by_group, keys)
            tensors |= states
        for key, tensor in tensors.items():
            part = tensor if type(tensor) is torch.Tensor else local(tensor)  # a shard of a DTensor
            require_readable(key, part)
            if not part.is_contiguous() and not is_tensor_key(key):  # the optimizer gets new tensors
                _require_writable(key, part)
        return tensors, {"training": training, "num_tp_shards": num_tp_shards}

    def prepare(
        self, num_tp_shards: Mapping[str, int], training: TrainingState, chunks: Mapping[str, Chunk]
    ) -> Restoring:
        """Check that a checkpoint fits, before anything changes. Raises PipelineError.

        `num_tp_shards`: of each weight and buffer of the whole model. `chunks`: one of each tensor that was saved.
        """
        names = _stored_names(self.weights.all, num_tp_shards)
        tensors: Tensors = {}
        keys: dict[torch.Tensor, str] = {}
        for weight, tp_shard in self.weights.local():
            _require_tp_shards(weight, num_tp_shards[names[weight.names[0]]])
            keys[weight.tensor] = key = weight.key(names[weight.names[0]], tp_shard)
            tensors[model_key(key)] = weight.tensor.detach()
            _require_alike(key, weight.tensor, chunks[model_key(key)])
        state = None
        if self.optimizer is not None:
            of_groups = require_records(self.optimizer, keys, training.records)
            state = scheduler_state(self.scheduler, training.scheduler, of_groups)
            for parameter, key in keys.items():
                if key in training.records:
                    tensors |= _state_tensors(parameter, key, training.records[key], chunks)
        require_random_state(training.random, self.device)
        return Restoring(self, tensors, keys, training, state)


@dataclass(frozen=True, slots=True)
class Restoring:
    """A checkpoint that fits: the caller fills `tensors`, then `finish` sets the rest."""

    trained: Trained
    tensors: Tensors
    keys: dict[torch.Tensor, str]
    training: TrainingState
    scheduler_state: Any

    def finish(self) -> None:
        """Set the states of the optimizer, the scheduler and the random generators from the checkpoint."""
        optimizer, scheduler = self.trained.optimizer, self.trained.scheduler
        if optimizer is not None:
            restore_optimizer(optimizer, self.keys, self.training.records, self.tensors)
        if scheduler is not None:
            scheduler.load_state_dict(self.scheduler_state)
        set_random_state(self.training.random, self.trained.device)


class Merged(NamedTuple):
    """The state of all ranks besides tensors, as JSON; the arguments of `save`, and weights' numbers of TP shards."""

    training: dict[str, Any]
    step: int
    extra: dict[str, Any]
    num_tp_shards: dict[str, int]


def merge(of_ranks: Sequence[dict[str, Any]]) -> Merged:
    """Merge what all ranks have collected; the random state is the first one's.

    Raises:
        PipelineError: the ranks differ where they must be equal.
    """
    groups: dict[str, tuple[Any, dict[str, Any]]] = {}
    known: dict[str, tuple[Any, Any]] = {}
    num_tp_shards: dict[str, int] = {}
    arguments = of_ranks[0]["given"]
    scheduler = next(filter(None, (small["training"]["scheduler"] for small in of_ranks)), None)
    for rank, small in enumerate(of_ranks):
        if not same(small["given"], arguments):
            raise PipelineError(
                f"process {rank} saves {small['given']}, but process 0 {arguments}; save the same on all"
            )
        num_tp_shards |= small["num_tp_shards"]
        for shared, of_weights in small["training"]["records"]:
            _, merged = groups.setdefault(json.dumps(shared), (shared, {}))
            for key, own in of_weights.items():
                if key in known:
                    _require_equal(rank, key, known[key], (shared, own))
                else:
                    known[key] = shared, own
                    merged[key] = own
        of_rank = small["training"]["scheduler"]
        if of_rank is not None and not same(of_rank, scheduler):
            raise PipelineError(
                f"process {rank}'s scheduler is in another state ({of_rank}) than those of earlier "
                f"processes ({scheduler}); step it equally often on all"
            )
    records = sorted((group for group in groups.values() if group[1]), key=lambda group: min(group[1]))
    training = {**of_ranks[0]["training"], "records": records, "scheduler": scheduler}
    return Merged(training, arguments["step"], arguments["extra"], num_tp_shards)


def _require_equal(rank: int, key: str, known: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    """Raises PipelineError if a rank has another record of a weight, in JSON, than a rank before."""
    for first, of_rank in zip(_parts(*known), _parts(*other), strict=True):
        if (name := different(first, of_rank)) is not None:
            raise PipelineError(
                f"process {rank} has {name} = {of_rank.get(name)} for {key}, and another has {first.get(name)}; train "
                f"it the same way on all ranks that hold it"
            )


def _parts(shared: dict[str, Any], own: list[Any]) -> tuple[dict[str, Any], ...]:
    """What must be equal on all ranks that hold a weight."""
    return shared["options"], {str(place): value for place, value in shared["scheduled"]}, own[1]


def _stored_names(weights: list[Weight], saved: Mapping[str, int]) -> dict[str, str]:
    """The saved name of each weight, by its first name. Raises PipelineError if the checkpoint is of another model."""
    stored: dict[str, str] = {}
    missing = []
    for weight in weights:
        name = next((name for name in weight.names if name in saved), None)
        if name is None:
            missing.append(weight.names[0])
        else:
            stored[weight.names[0]] = name
    known = {*stored.values()}
    extra = [name for name in saved if name not in known]
    if missing or extra:
        what = [f"{kind} {few(names)}" for kind, names in (("lacks", missing), ("also has", extra)) if names]
        raise PipelineError(
            f"this is another model: the checkpoint {' and '.join(what)}; build the one that was saved. If it is the "
            "same model, cut elsewhere by hand, name its weights as when it was saved: Stages(…, names=[…])"
        )
    return stored


def _require_writable(key: str, tensor: torch.Tensor) -> None:
    """Raises PipelineError if nothing can be copied into the tensor, as several of its elements are one number."""
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    if any(stride == 0 and size > 1 for stride, size in steps):
        raise PipelineError(
            f"{key} is expanded, so that several elements are one number in memory: nothing restores it; clone() it"
        )


def _require_tp_shards(weight: Weight, num_tp_shards: int) -> None:
    """Each rank checks only weights of its own stages: other ranks may wrap theirs in another way."""
    if weight.num_tp_shards != num_tp_shards:
        raise PipelineError(
            f"{weight.names[0]} was saved in {num_tp_shards} TP shards, but has {weight.num_tp_shards} here; TP shards "
            f"are not joined or cut again: resume on as many tensor-parallel ranks as it was saved on"
        )


def _require_alike(key: str, tensor: torch.Tensor, stored: Chunk) -> None:
    was, now = (list(stored.size), stored.dtype), (list(tensor.shape), tensor.dtype)
    if was != now:
        raise PipelineError(f"{key} was saved as {was[0]} of {was[1]}, but is {now[0]} of {now[1]}; make both equal")


def _state_tensors(parameter: torch.Tensor, key: str, record: Record, chunks: Mapping[str, Chunk]) -> Tensors:
    """Tensors to read an optimizer's state of one weight into."""
    tensors: Tensors = {}
    for name in record.tensors:
        stored = chunks[full := tensor_key(key, name)]
        if _is_on_host(name, stored, record.options):
            tensors[full] = torch.empty(stored.size, dtype=stored.dtype, device="cpu")
        elif stored.size == tuple(parameter.shape):
            tensors[full] = torch.empty_like(parameter, dtype=stored.dtype, requires_grad=False)
        else:
            tensors[full] = torch.empty(stored.size, dtype=stored.dtype, device=parameter.device)
    return tensors


def _is_on_host(name: str, stored: Chunk, options: dict[str, Any]) -> bool:
    """Whether it is a count of steps on the host, where PyTorch's optimizers have it unless their kernels read it."""
    is_count = name == "step" and prod(stored.size) == 1
    return is_count and not options.get("capturable") and not options.get("fused")
