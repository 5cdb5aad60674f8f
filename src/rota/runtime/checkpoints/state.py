"""What a rank saves and restores: tensors by name, and all other state of the training as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import msgspec
import torch
from torch.optim import Optimizer

from rota.core.errors import FormatError, PipelineError
from rota.core.reading import LARGEST, Field, Whole, short
from rota.runtime.checkpoints.optimizer_state import (
    Group,
    SavedScheduler,
    WeightRecord,
    groups_of,
    is_tensor_key,
    records_of,
    require_records,
    restore_optimizer,
    scheduler_state,
    split_scheduler,
    tensor_key,
)
from rota.runtime.checkpoints.random_states import RandomState, random_state, require_random_state, set_random_state
from rota.runtime.checkpoints.tensors import Chunk, Index, Reader, Tensors
from rota.runtime.checkpoints.values import DTYPES, from_json, require_readable, same, to_json
from rota.runtime.checkpoints.weights import Weight, Weights, few, model_key
from rota.runtime.reducing.norms import local

_CPU = torch.device("cpu")


class RankState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that a rank's file has besides tensors.

    `step` and `extra` are what `save` or `commit` was given; `newest_at_load` is the number of the newest checkpoint
    when the training loaded last.
    """

    step: Whole
    extra: dict[str, Any]
    newest_at_load: Whole
    groups: list[Group]
    scheduler: SavedScheduler | None
    random: RandomState


class TrainingState(NamedTuple):
    """All state of a training besides tensors: what the first rank has; the records of all weights; the scheduler's."""

    first: RankState
    records: dict[str, WeightRecord]
    scheduler: SavedScheduler | None


def _rank_state(field: Field) -> RankState:
    try:
        state: RankState = Field(field.path, from_json(field)).read(RankState)
    except IndexError as error:  # msgspec takes a tensor for a mapping
        raise FormatError(f"{field.path} has a tensor where an object must be ({error})") from None
    return state


def read_training(fields: Iterable[Field]) -> TrainingState:
    """The state of a training from what its ranks have written; the random state is the first one's.

    Raises FormatError if a field is wrong, or if the ranks differ where they must be equal.
    """
    ranks = [*map(_rank_state, fields)]
    first = ranks[0]
    scheduler = next((rank.scheduler for rank in ranks if rank.scheduler is not None), None)
    for number, rank in enumerate(ranks):
        if rank.step != first.step or not same(rank.extra, first.extra):
            raise FormatError(
                f"process {number} has saved step {rank.step} with {short(rank.extra)}, but process 0 step "
                f"{first.step} with {short(first.extra)}; save the same on all"
            )
        if rank.scheduler is not None and not same(rank.scheduler, scheduler):
            raise FormatError(
                f"process {number}'s scheduler is in another state, {short(rank.scheduler[1])}, than those of earlier "
                f"processes, {short(scheduler and scheduler[1])}; step it equally often on all"
            )
        require_random_state(rank.random, _CPU)
    return TrainingState(first, records_of(rank.groups for rank in ranks), scheduler)


@dataclass(frozen=True, slots=True)
class Trained:
    """What training changes on this rank, whose stages are on `device`: all that is saved."""

    weights: Weights
    optimizer: Optimizer | None
    scheduler: Any
    device: torch.device

    def collect(
        self, step: int, extra: dict[str, Any], newest_at_load: int, with_buffers: bool = True
    ) -> tuple[Tensors, dict[str, Any]]:
        """This rank's tensors, not copied, and all other state as the JSON of `RankState`.

        Raises PipelineError if some of it could not be restored.
        """
        require_step(step)
        tensors: Tensors = {}
        keys: dict[torch.Tensor, str] = {}
        for weight, tp_shard in self.weights.local():
            keys[weight.tensor] = key = weight.key(weight.names[0], tp_shard)
            if with_buffers or not weight.is_buffer:
                tensors[model_key(key)] = weight.tensor.detach()
        scheduler: SavedScheduler | None = None
        groups: list[dict[str, Any]] = []
        if self.optimizer is not None:
            scheduler, by_group = split_scheduler(self.scheduler, len(self.optimizer.param_groups))
            groups, states = groups_of(self.optimizer, by_group, keys)
            tensors |= states
        for key, tensor in tensors.items():
            part = tensor if type(tensor) is torch.Tensor else local(tensor)  # a shard of a DTensor
            require_readable(key, part)
            steps = () if part.is_contiguous() or is_tensor_key(key) else zip(part.stride(), part.shape, strict=True)
            if any(stride == 0 and size > 1 for stride, size in steps):  # the optimizer gets new tensors
                raise PipelineError(
                    f"{key} is expanded, so that several elements are one number in memory: nothing restores it; "
                    f"clone() it"
                )
        random = msgspec.structs.asdict(random_state(self.device))
        state = to_json({"groups": groups, "scheduler": scheduler, "random": random}, "the training's state")
        return tensors, {
            "step": step,
            "extra": to_json(_plain(extra), "extra"),
            "newest_at_load": newest_at_load,
            **state,
        }

    def prepare(self, num_tp_shards: Mapping[str, int], training: TrainingState, index: Index) -> Restoring:
        """Check that what was saved fits, before anything changes. Raises PipelineError.

        `num_tp_shards`: of each weight and buffer of the whole model. `index`: where the tensors are.
        """
        names = _stored_names(self.weights.all, num_tp_shards)
        tensors: Tensors = {}
        keys: dict[torch.Tensor, str] = {}
        for weight, tp_shard in self.weights.local():
            name = names[weight.names[0]]
            # Of other ranks' weights it is not known: they may wrap them otherwise.
            if weight.num_tp_shards != num_tp_shards[name]:
                raise PipelineError(
                    f"{name} was saved in {num_tp_shards[name]} TP shards, but has {weight.num_tp_shards} here; TP "
                    f"shards are not joined or cut again: resume on as many tensor-parallel ranks as it was saved on"
                )
            keys[weight.tensor] = key = weight.key(name, tp_shard)
            tensors[model_key(key)] = tensor = weight.tensor.detach()
            stored = _chunk(index, model_key(key))
            was, now = (list(stored.size), DTYPES[stored.dtype]), (list(tensor.shape), tensor.dtype)
            if was != now:
                raise PipelineError(
                    f"{key} was saved as {was[0]} of {was[1]}, but is {now[0]} of {now[1]}; make both equal"
                )
        state = None
        if self.optimizer is not None:
            groups = require_records(self.optimizer, keys, training.records)
            state = scheduler_state(self.scheduler, training.scheduler, groups)
            for parameter, key in keys.items():
                if key in training.records:
                    tensors |= _state_tensors(parameter, key, training.records[key], index)
        require_random_state(training.first.random, self.device)
        return Restoring(self, tensors, keys, training, state, Reader(index, tensors))


@dataclass(frozen=True, slots=True)
class Restoring:
    """A state that fits: `reader` fills `tensors`, then `finish` sets the rest."""

    trained: Trained
    tensors: Tensors
    keys: dict[torch.Tensor, str]
    training: TrainingState
    scheduler_state: Any
    reader: Reader

    def finish(self) -> None:
        """Set the states of the optimizer, the scheduler and the random generators."""
        optimizer, scheduler = self.trained.optimizer, self.trained.scheduler
        if optimizer is not None:
            restore_optimizer(optimizer, self.keys, self.training.records, self.tensors)
        if scheduler is not None:
            scheduler.load_state_dict(self.scheduler_state)
        set_random_state(self.training.first.random, self.trained.device)


def require_step(step: object) -> None:
    """Raises PipelineError if it is not the number of a step, or too large to be read again."""
    if type(step) is not int or not 0 <= step <= LARGEST:
        raise PipelineError(f"step={step!r}; give a whole number from 0 to {LARGEST:,}")


def _chunk(index: Index, key: str) -> Chunk:
    """One of the chunks of a tensor."""
    if key not in index:
        raise PipelineError(f"{short(key)} was not saved; make the model that was")
    return index[key][0].chunk


def _stored_names(weights: list[Weight], saved: Mapping[str, int]) -> dict[str, str]:
    """The saved name of each weight, by its first name. Raises PipelineError if the checkpoint is of another model."""
    names = {weight.names[0]: next((name for name in weight.names if name in saved), "") for weight in weights}
    missing = [name for name, stored in names.items() if not stored]
    known = {*names.values()}
    extra = [name for name in saved if name not in known]
    if missing or extra:
        differences = [f"{verb} {few(names)}" for verb, names in (("lacks", missing), ("also has", extra)) if names]
        raise PipelineError(
            f"this is another model: the checkpoint {' and '.join(differences)}; build the one that was saved. If it "
            "is the same model, cut elsewhere by hand, name its weights as when it was saved: Stages(…, names=[…])"
        )
    return names


def _plain(value: Any) -> Any:
    """The value of a script with numbers, texts and dicts of other classes, such as numpy.float64, as Python's own."""
    if isinstance(value, dict) and type(value) is not Counter:
        return {_plain(key): _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if isinstance(value, bool):
        return value
    for kind, as_own in ((float, float.__float__), (int, int.__int__), (str, str.__str__)):
        if isinstance(value, kind):
            return as_own(value)  # type: ignore[arg-type]
    return value


def _state_tensors(parameter: torch.Tensor, key: str, record: WeightRecord, index: Index) -> Tensors:
    """Tensors to read an optimizer's state of one weight into."""
    tensors, is_read_by_kernels = Tensors(), any(map(record.group.options.get, ("capturable", "fused")))
    for name in record.tensors:
        stored = _chunk(index, full := tensor_key(key, name))
        dtype = DTYPES[stored.dtype]
        # PyTorch's optimizers count steps on the host, unless their kernels read the count.
        is_on_host = name == "step" and prod(stored.size) == 1 and not is_read_by_kernels
        if stored.size == tuple(parameter.shape) and not is_on_host:
            tensors[full] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        else:
            device = torch.device("cpu") if is_on_host else parameter.device
            tensors[full] = torch.empty(stored.size, dtype=dtype, device=device)
    return tensors
