"""Optimizer and scheduler state under the whole model's names: each weight has its own state and options.

Values per group, of an optimizer (`lr`, `betas`, …) or a scheduler (`base_lrs`, …), are saved for each weight of the
group. So ranks may hold other weights after a resume; only the groups must be made by the same rule.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
import torch
from msgspec import Meta
from torch.optim import Optimizer

from rota.core.errors import PipelineError
from rota.core.reading import LONGEST_NAME, Field, Name, Whole, printable, short
from rota.runtime.checkpoints.values import from_json, to_json

#: Where a value per group is in a scheduler's state: ("base_lrs",), or ("_schedulers", 0, …) in a nested scheduler.
Place: TypeAlias = tuple[str | int, ...]


class Record(NamedTuple):
    """What is saved of a weight besides its tensors; all but `tensors` and `values` is that of its group.

    `optimizer`: its class. `scheduled`: the scheduler's values. `tensors`: names of state tensors; `values`: all other
    state.
    """

    optimizer: str
    options: dict[str, Any]
    scheduled: dict[Place, Any]
    tensors: tuple[str, ...]
    values: dict[str, Any]


_OPTIMIZER = "optimizer/"
_OF_THE_RANK = ("params", "param_names")  # of a group; all other entries are options
_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")


def records_of(
    optimizer: Optimizer, by_group: Mapping[Place, list[Any]], keys: Mapping[torch.Tensor, str]
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """What to save of this rank's optimizer and scheduler: records as JSON, and state tensors by tensor key.

    The JSON has, for each group, what its weights share, and what each has of its own, by its key. `by_group`: the
    scheduler's values per group, see `split_scheduler`.

    Raises PipelineError if the optimizer has state that is not of a weight, or that could not be restored.
    """
    if beside := [key for key in optimizer.state if not isinstance(key, torch.Tensor)]:
        raise PipelineError(
            f"{type(optimizer).__name__}'s state has the key {short(beside[0])}, which is not a weight, so it would be "
            f"lost; keep it in the options of a group, or in the state of a weight"
        )
    kind = type(optimizer).__name__
    groups: list[Any] = []
    tensors: dict[str, torch.Tensor] = {}
    for index, group in enumerate(optimizer.param_groups):
        of_weights: dict[str, Any] = {}
        for parameter in group["params"]:
            key = _key_of(parameter, index, keys)
            state, path = optimizer.state.get(parameter, {}), f"{kind}'s state of {key}"
            names = [name for name, value in state.items() if isinstance(value, torch.Tensor)]
            for name in names:
                if type(name) is not str or not (name.isprintable() and 1 <= len(name) <= LONGEST_NAME):
                    raise PipelineError(f"{path} has the key {short(name)}; use a string of printable characters")
                tensors[tensor_key(key, name)] = state[name]
            of_weights[key] = [names, to_json({k: value for k, value in state.items() if k not in names}, path)]
        if of_weights:
            options = {name: value for name, value in group.items() if name not in _OF_THE_RANK}
            scheduled = [
                [[*place], to_json(values[index], f"the scheduler's {place[-1]}")] for place, values in by_group.items()
            ]
            shared = {
                "optimizer": kind,
                "options": to_json(options, f"the options of {kind}'s group {index}"),
                "scheduled": scheduled,
            }
            groups.append([shared, of_weights])
    return groups, tensors


class _Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the weights of a group share, as `records_of` writes it."""

    optimizer: Name
    options: Any
    scheduled: tuple[tuple[Annotated[tuple[Name | Whole, ...], Meta(min_length=1)], Any], ...]


_Written: TypeAlias = list[tuple[_Group, dict[Name, tuple[tuple[Name, ...], Any]]]]


def read_records(field: Field) -> dict[str, Record]:
    """The records that `records_of` wrote, by weight. Raises FormatError that names the field."""
    records: dict[str, Record] = {}
    for group, of_weights in field.read(_Written):
        options = _dict(Field(f"{field.path}, options", group.options))
        if not options.keys().isdisjoint(_OF_THE_RANK):
            raise field.wrong(f"options without {' and '.join(_OF_THE_RANK)}, which differ between ranks")
        scheduled = {place: from_json(Field(f"{field.path}, scheduled", value)) for place, value in group.scheduled}
        for key, (tensors, state) in of_weights.items():
            values = _dict(Field(f"{field.path}, {short(key)}", state))
            if key in records or len({*tensors, *values}) < len(tensors) + len(values):
                raise field.wrong(f"weights and names that occur once, not twice as in {short(key)}")
            records[key] = Record(group.optimizer, options, scheduled, tensors, values)
    return records


def _dict(field: Field) -> dict[str, Any]:
    if type(value := from_json(field)) is not dict:
        raise field.wrong("a dict")
    return value


def refuse_inner_optimizers(optimizer: Optimizer) -> None:
    """Raises PipelineError if the state is that of another optimizer inside this one: it would be lost."""
    for name, value in vars(optimizer).items():
        for inner in _each(value):
            if isinstance(inner, Optimizer) and inner.state is not optimizer.state:
                raise PipelineError(
                    f"the optimizer, a {type(optimizer).__name__}, keeps its state in another one, a "
                    f"{type(inner).__name__} ({name}), where it would be lost; give an optimizer with a state of its "
                    f"own (fully_shard divides that among replicas)"
                )


def _each(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else (value,)


def tensor_key(key: str, name: str) -> str:
    """The key of a weight's state tensor."""
    return f"{_OPTIMIZER}{key}/{name}"


def is_tensor_key(key: str) -> bool:
    """Whether it is the key of a state tensor, not of a weight or buffer."""
    return key.startswith(_OPTIMIZER)


def _key_of(parameter: torch.Tensor, group: int, keys: Mapping[torch.Tensor, str]) -> str:
    if parameter not in keys:
        raise PipelineError(
            f"the optimizer's group {group} has a parameter of shape {list(parameter.shape)} that is in none of this "
            f"rank's stages; give it only pipeline.parameters()"
        )
    return keys[parameter]


def require_records(
    optimizer: Optimizer, keys: Mapping[torch.Tensor, str], records: Mapping[str, Record]
) -> list[Record | None]:
    """The record of each group's weights, None for an empty group. Raises PipelineError if they do not fit."""
    by_group: list[Record | None] = []
    wanted = set()
    for index, group in enumerate(optimizer.param_groups):
        of_group = [_key_of(parameter, index, keys) for parameter in group["params"]]
        for key in of_group:
            if key not in records:
                raise PipelineError(f"{key} had no optimizer when it was saved; leave it out of this one, too")
            if records[key].optimizer != type(optimizer).__name__:
                raise PipelineError(f"saved with {records[key].optimizer}, but this is {type(optimizer).__name__}")
            _require_one_group(index, of_group[0], key, records)
        first = records[of_group[0]] if of_group else None
        for name, value in first.options.items() if first is not None else ():
            _require_like(group.get(name), value, f"{of_group[0]}'s {_shown(name)}")
        by_group.append(first)
        wanted |= {*of_group}
    if left := [key for key in keys.values() if key in records and key not in wanted]:
        raise PipelineError(f"{left[0]} was in the optimizer when it was saved, but is not in this one; add it")
    return by_group


def _require_one_group(index: int, key: str, other_key: str, records: Mapping[str, Record]) -> None:
    a, b = records[key], records[other_key]
    for was, now in ((a.options, b.options), (a.scheduled, b.scheduled)):
        if was is not now and (name := different(was, now)) is not None:
            raise PipelineError(
                f"{key} and {other_key} are in one group, {index}, but were saved with different {_shown(name)} "
                f"({_shown(was.get(name))} and {_shown(now.get(name))}); group the weights as when they were saved"
            )


def _shown(value: Any) -> str:
    """A value from a file that is not trusted, for an error message."""
    return printable(short(str(value)).strip('"'))


def restore_optimizer(
    optimizer: Optimizer,
    keys: Mapping[torch.Tensor, str],
    records: Mapping[str, Record],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Set options and state. Does not use `load_state_dict`, which converts state to the dtype of the weights."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            record = records[keys[parameter]]
            state = {name: tensors[tensor_key(keys[parameter], name)] for name in record.tensors}
            if state or record.values:
                optimizer.state[parameter] = {**_beside_all(parameter, record.values), **state}
        if group["params"]:  # which all have the same options
            before = {name: group.pop(name) for name in [*group] if name not in _OF_THE_RANK}
            group.update({name: _beside(before.get(name), value) for name, value in record.options.items()})


def _beside(before: Any, value: Any) -> Any:
    """A copy of an option or a state, on the device of the value it replaces."""
    if isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor):
        return value.to(before.device, copy=True)
    return copy.deepcopy(value)


def _beside_all(parameter: torch.Tensor, value: Any) -> Any:
    """A copy of an optimizer's state of a weight, with all tensors inside on the weight's device."""
    if type(value) is dict:
        return {key: _beside_all(parameter, item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_beside_all(parameter, item) for item in value)
    return _beside(parameter, value)


_KINDS: tuple[tuple[type, ...], ...] = ((bool,), (int, float, torch.Tensor), (str,), (list, tuple), (dict,))


def _require_like(own: Any, saved: Any, path: str, owner: type = object) -> None:
    """Raises PipelineError if a saved value's kind differs from that of the one in use, at any depth; None fits all.

    Entries that are not in use must not hide what all instances of `owner` have.
    """
    in_use, entries = _entries(own), _entries(saved)
    if own is not None and saved is not None:
        kind: tuple[type, ...] = next((kind for kind in _KINDS if isinstance(own, kind)), (type(own),))
        if not isinstance(saved, kind) or (isinstance(saved, bool) and bool not in kind):
            raise PipelineError(
                f"{path} was saved as a {type(saved).__name__}, {short(str(saved))}, but is a {type(own).__name__} "
                f"here; make it a {type(saved).__name__}"
            )
        holds_dicts = not isinstance(own, dict) and any(isinstance(item, dict) for item in in_use.values())
        if holds_dicts and len(entries) != len(in_use):
            raise PipelineError(
                f"{path} was saved with {len(entries)} entries, but has {len(in_use)} here; make it as many"
            )
    for name, value in entries.items():
        if isinstance(name, str) and name not in in_use and (name.startswith("__") or hasattr(owner, name)):
            raise PipelineError(f"the checkpoint would replace {owner.__name__}'s {short(name)}; do not use it")
        _require_like(in_use.get(name), value, f"{path}, {short(name)}", owner)


def _entries(value: Any) -> Mapping[Any, Any]:
    """The values inside of a value by their names, or by their positions."""
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    return value if isinstance(value, dict) else {}


# --- schedulers -------------------------------------------------------------------------------------------------------


class SavedScheduler(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A scheduler's class, and its state without values per group."""

    scheduler: Name
    state: dict[str, Any]


def split_scheduler(scheduler: Any, num_groups: int) -> tuple[SavedScheduler | None, dict[Place, list[Any]]]:
    """Split a scheduler's state into the part equal on all ranks, and values per group; (None, {}) if it is None."""
    if scheduler is None:
        return None, {}
    by_group: dict[Place, list[Any]] = {}

    def common(state: Any, place: Place) -> Any:
        if isinstance(state, list):
            if place[-1] in _BY_GROUP and len(state) == num_groups:
                by_group[place] = state
                return None
            return [common(value, (*place, i)) for i, value in enumerate(state)]
        return {key: common(value, (*place, key)) for key, value in state.items()} if type(state) is dict else state

    return SavedScheduler(type(scheduler).__name__, common(scheduler.state_dict(), ())), by_group


def scheduler_state(scheduler: Any, saved: SavedScheduler | None, of_groups: list[Record | None]) -> Any:
    """The state to load into a scheduler; a group without weights keeps its values. Raises PipelineError.

    PyTorch's schedulers turn every entry of their state into an attribute. So an entry that would hide a method is
    refused, and a value whose kind differs from that of the one in use.
    """
    was = "no scheduler" if saved is None else saved.scheduler
    now = "no scheduler" if scheduler is None else type(scheduler).__name__
    if was != now:
        raise PipelineError(f"saved with {was}, but this rank's optimizer has {now}; give Checkpoints the same kind")
    if saved is None:
        return None
    state = copy.deepcopy(saved.state)
    _, in_use = split_scheduler(scheduler, len(of_groups))
    for place in {*in_use, *(place for record in of_groups if record for place in record.scheduled)}:
        name = f"{was}'s {_shown('.'.join(map(str, place)))}"
        values = [*in_use.get(place, [None] * len(of_groups))]
        for index, record in enumerate(of_groups):
            if record is not None:
                if place not in record.scheduled:
                    raise PipelineError(f"{name} was saved for no group; make as many groups as when it was saved")
                value, current = record.scheduled[place], values[index]
                if place[-1] == "lr_lambdas" and (value is None) is not (current is None):
                    raise PipelineError(f"{name} was saved {'without' if value is None else 'with'} a state of its own")
                values[index] = _beside(current, value)
        *path, last = place
        inner: Any = state
        for step in path:
            inner = _entries(inner).get(step)
        if not isinstance(inner, dict) or inner.get(last, "") is not None:
            raise PipelineError(f"{name} is not in the checkpoint; load it with the version of PyTorch that saved it")
        inner[last] = values
    _require_like(scheduler.state_dict(), state, f"{was}'s state", type(scheduler))
    return state


def different(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> Any:
    """The first key whose values differ, None if all are the same."""
    return next((key for key in {**a, **b} if key not in a or key not in b or not same(a[key], b[key])), None)


def same(a: Any, b: Any) -> bool:
    """Whether two values are exactly equal, including all tensors inside."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping):
        return different(a, b) is None
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))
