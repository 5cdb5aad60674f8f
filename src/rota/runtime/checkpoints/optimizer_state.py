"""Optimizer and scheduler state under the whole model's names: each weight has its own state and options.

Values per group, of an optimizer (`lr`, `betas`, …) or a scheduler (`base_lrs`, …), belong to each weight of the group.
So ranks may hold other weights after a resume; only the groups must be made by the same rule.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import msgspec
import torch
from torch.optim import Optimizer

from rota.core.errors import FormatError, PipelineError
from rota.core.reading import LONGEST_NAME, Name, printable, short
from rota.runtime.checkpoints.values import different


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group of an optimizer's: its class, what all of the group's weights share, and what each has.

    `scheduled`: the scheduler's values for the group, by their places. `weights`: by their keys, the names of state
    tensors, and all other state.
    """

    optimizer: Name
    options: dict[str, Any]
    scheduled: dict[str, Any]
    weights: dict[Name, tuple[tuple[Name, ...], dict[str, Any]]]


class WeightRecord(NamedTuple):
    """What is saved of a weight besides its tensors: that of its group; names of state tensors; all other state."""

    group: Group
    tensors: tuple[str, ...]
    values: dict[str, Any]


#: A scheduler's class, and its state without values per group.
SavedScheduler: TypeAlias = tuple[Name, dict[str, Any]]
#: Where a value per group is in a scheduler's state: ("base_lrs",), or ("_schedulers", 0, …) in a nested scheduler.
Place: TypeAlias = tuple[str | int, ...]

_OPTIMIZER = "optimizer/"
_OF_THE_RANK = ("params", "param_names")  # of a group; all other entries are options
_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")


def tensor_key(key: str, name: str) -> str:
    """The key of a weight's state tensor."""
    return f"{_OPTIMIZER}{key}/{name}"


def is_tensor_key(key: str) -> bool:
    """Whether it is the key of a state tensor, not of a weight or buffer."""
    return key.startswith(_OPTIMIZER)


# --- saving -----------------------------------------------------------------------------------------------------------


def groups_of(
    optimizer: Optimizer, by_group: Mapping[Place, list[Any]], keys: Mapping[torch.Tensor, str]
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """This rank's groups, each as the fields of a `Group`; and all state tensors by tensor key.

    `by_group`: the scheduler's values per group, see `split_scheduler`. Raises PipelineError if there is state that is
    not of a weight.
    """
    kind = type(optimizer).__name__
    if beside := [key for key in optimizer.state if not isinstance(key, torch.Tensor)]:
        raise PipelineError(
            f"{kind}'s state has the key {short(beside[0])}, which is not a weight, so it would be lost; keep it in "
            f"the options of a group, or in the state of a weight"
        )
    groups: list[dict[str, Any]] = []
    tensors: dict[str, torch.Tensor] = {}
    for index, group in enumerate(optimizer.param_groups):
        weights: dict[str, Any] = {}
        for parameter in group["params"]:
            key, state = _key_of(parameter, index, keys), optimizer.state.get(parameter, {})
            names = [name for name, value in state.items() if isinstance(value, torch.Tensor)]
            for name in state:
                if type(name) is not str or not (name.isprintable() and 1 <= len(name) <= LONGEST_NAME):
                    raise PipelineError(
                        f"{kind}'s state of {key} has the key {short(name)}; use a string of printable characters"
                    )
            tensors |= {tensor_key(key, name): state[name] for name in names}
            weights[key] = names, {name: value for name, value in state.items() if name not in names}
        if weights:
            options = {name: value for name, value in group.items() if name not in _OF_THE_RANK}
            scheduled = {_text_of(place): values[index] for place, values in by_group.items()}
            groups.append({"optimizer": kind, "options": options, "scheduled": scheduled, "weights": weights})
    return groups, tensors


def _text_of(place: Place) -> str:
    return ".".join(map(str, place))


def refuse_inner_optimizers(optimizer: Optimizer) -> None:
    """Raises PipelineError if the state is that of another optimizer inside this one: it would be lost."""
    for name, value in vars(optimizer).items():
        for inner in (value, *_entries(value).values()):
            if isinstance(inner, Optimizer) and inner.state is not optimizer.state:
                raise PipelineError(
                    f"the optimizer, a {type(optimizer).__name__}, keeps its state in another one, a "
                    f"{type(inner).__name__} ({name}), where it would be lost; give an optimizer with a state of its "
                    f"own (fully_shard divides that among replicas)"
                )


def _key_of(parameter: torch.Tensor, group: int, keys: Mapping[torch.Tensor, str]) -> str:
    if parameter not in keys:
        raise PipelineError(
            f"the optimizer's group {group} has a parameter of shape {list(parameter.shape)} that is in none of this "
            f"rank's stages; give it only pipeline.parameters()"
        )
    return keys[parameter]


# --- loading ----------------------------------------------------------------------------------------------------------


def records_of(groups_of_ranks: Iterable[list[Group]]) -> dict[str, WeightRecord]:
    """The records of all ranks by weight. Raises FormatError if two ranks differ in one, or if one is malformed."""
    records: dict[str, WeightRecord] = {}
    for rank, groups in enumerate(groups_of_ranks):
        seen: set[str] = set()
        for group in groups:
            if not group.options.keys().isdisjoint(_OF_THE_RANK):
                raise FormatError(f"process {rank} has options with {' or '.join(_OF_THE_RANK)}, which are no options")
            for key, (tensors, values) in group.weights.items():
                if key in seen or len({*tensors, *values}) < len(tensors) + len(values):
                    raise FormatError(f"process {rank} has {short(key)}, or a state of it, twice")
                seen.add(key)
                own = WeightRecord(group, tensors, values)
                _require_equal(rank, key, records.setdefault(key, own), own)
    return records


def _require_equal(rank: int, key: str, known: WeightRecord, own: WeightRecord) -> None:
    """Raises FormatError if a rank has another record of a weight than a rank before."""
    for was, now in zip(_parts(known), _parts(own), strict=True):
        if was is not now and (name := different(was, now)) is not None:
            raise FormatError(
                f"process {rank} has {_shown(name)} = {_shown(now.get(name))} for {_shown(key)}, and another has "
                f"{_shown(was.get(name))}; train it the same way on all ranks that hold it"
            )


def _parts(record: WeightRecord) -> tuple[dict[str, Any], ...]:
    kinds = {"optimizer": record.group.optimizer, "state": record.tensors}
    return kinds, record.group.options, record.group.scheduled, record.values


def require_records(
    optimizer: Optimizer, keys: Mapping[torch.Tensor, str], records: Mapping[str, WeightRecord]
) -> list[Group | None]:
    """The saved group of each group's weights, None for an empty one. Raises PipelineError if they do not fit."""
    saved_groups: list[Group | None] = []
    trained = set()
    for index, group in enumerate(optimizer.param_groups):
        first: tuple[str, Group] | None = None
        for parameter in group["params"]:
            trained.add(key := _key_of(parameter, index, keys))
            if key not in records:
                raise PipelineError(f"{key} had no optimizer when it was saved; leave it out of this one, too")
            saved = records[key].group
            if saved.optimizer != type(optimizer).__name__:
                raise PipelineError(f"saved with {saved.optimizer}, but this is {type(optimizer).__name__}")
            if first is None:
                first = key, saved
                for name, value in saved.options.items():
                    _require_like(group.get(name), value, f"{key}'s {_shown(name)}")
            _require_one_group(index, *first, key, saved)
        saved_groups.append(first and first[1])
    if lacking := [key for key in keys.values() if key in records and key not in trained]:
        raise PipelineError(f"{lacking[0]} was in the optimizer when it was saved, but is not in this one; add it")
    return saved_groups


def _require_one_group(index: int, key: str, group: Group, other_key: str, other: Group) -> None:
    for was, now in ((group.options, other.options), (group.scheduled, other.scheduled)):
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
    records: Mapping[str, WeightRecord],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Set options and state. Does not use `load_state_dict`, which converts state to the dtype of the weights."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            record = records[keys[parameter]]
            state = {name: tensors[tensor_key(keys[parameter], name)] for name in record.tensors}
            if state or record.values:
                optimizer.state[parameter] = {**_beside(parameter, record.values), **state}
        if group["params"]:  # which all have the same options
            before = {name: group.pop(name) for name in [*group] if name not in _OF_THE_RANK}
            group.update({name: _beside(before.get(name), value) for name, value in record.group.options.items()})


def _beside(before: Any, value: Any) -> Any:
    """A copy of what was saved, with all tensors inside on the device of the tensor that is there now, if it is one."""
    if type(value) is dict:
        return {key: _beside(before, item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_beside(before, item) for item in value)
    if isinstance(value, torch.Tensor):
        return value.to(before.device if isinstance(before, torch.Tensor) else value.device, copy=True)
    return copy.deepcopy(value)


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

    return (type(scheduler).__name__, common(scheduler.state_dict(), ())), by_group


def scheduler_state(scheduler: Any, saved: SavedScheduler | None, of_groups: list[Group | None]) -> Any:
    """The state to load into a scheduler; a group without weights keeps its values. Raises PipelineError.

    PyTorch's schedulers turn every entry of their state into an attribute. So an entry that would hide a method is
    refused, and a value whose kind differs from that of the one in use.
    """
    was = "no scheduler" if saved is None else saved[0]
    now = "no scheduler" if scheduler is None else type(scheduler).__name__
    if was != now:
        raise PipelineError(f"saved with {was}, but this rank's optimizer has {now}; give Checkpoints the same kind")
    if saved is None:
        return None
    state = copy.deepcopy(saved[1])
    _, in_use = split_scheduler(scheduler, len(of_groups))
    for place, current in in_use.items():
        name = f"{was}'s {_text_of(place)}"
        *path, last = place
        inner: Any = state
        for step in path:
            inner = _entries(inner).get(step)
        if not isinstance(inner, dict) or inner.get(last, "") is not None:
            raise PipelineError(f"{name} is not in the checkpoint; load it with the version of PyTorch that saved it")
        inner[last] = [
            value if group is None else _scheduled(name, value, group.scheduled, _text_of(place))
            for value, group in zip(current, of_groups, strict=True)
        ]
    for group in filter(None, of_groups):
        if others := group.scheduled.keys() - {_text_of(place) for place in in_use}:
            raise PipelineError(
                f"{was}'s {_shown(min(others))} was saved for each group, and is not here; make as many groups as when "
                f"it was saved"
            )
    _require_like(scheduler.state_dict(), state, f"{was}'s state", type(scheduler))
    return state


def _scheduled(name: str, current: Any, saved: Mapping[str, Any], place: str) -> Any:
    """A group's value at a place, which is `current` now."""
    if place not in saved:
        raise PipelineError(f"{name} was saved for no group; make as many groups as when it was saved")
    value = saved[place]
    if place.rpartition(".")[2] == "lr_lambdas" and (value is None) is not (current is None):
        raise PipelineError(f"{name} was saved {'without' if value is None else 'with'} a state of its own")
    return _beside(current, value)
