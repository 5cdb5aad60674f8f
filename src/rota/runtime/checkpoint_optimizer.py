"""Optimizer and scheduler by the whole model's names: each weight has its own state and options.

What an optimizer has by group (`lr`, `betas`, …) and a scheduler by group (`base_lrs`, …) is written down once for each
weight of the group. So ranks may hold other weights after a resume; only the groups must be made by the same rule.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer

from rota.errors import PipelineError

#: Of one weight: "optimizer", "options", "tensors" (names of state tensors), "values" (other state), "scheduled".
Record: TypeAlias = dict[str, Any]
#: Where a value by group is in a scheduler's state: ("base_lrs",), or inside of others' as ("_schedulers", 0, …).
Place: TypeAlias = tuple[str | int, ...]

_OF_THE_RANK = ("params", "param_names")  # in a group; all else are options
_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")


def records_of(
    optimizer: Optimizer, scheduler: Any, keys: Mapping[torch.Tensor, str]
) -> tuple[dict[str, Record], dict[str, torch.Tensor]]:
    """What to save of this rank's optimizer and scheduler: records by the weights' `keys`, and state tensors."""
    _, by_group = split_scheduler(scheduler, len(optimizer.param_groups))
    records: dict[str, Record] = {}
    tensors: dict[str, torch.Tensor] = {}
    for index, group in enumerate(optimizer.param_groups):
        options = {name: value for name, value in group.items() if name not in _OF_THE_RANK}
        scheduled = {place: values[index] for place, values in by_group.items()}
        for parameter in group["params"]:
            key = _key_of(parameter, index, keys)
            state = optimizer.state.get(parameter, {})
            of_tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
            records[key] = {
                "optimizer": type(optimizer).__name__,
                "options": options,
                "tensors": [*of_tensors],
                "values": {name: value for name, value in state.items() if name not in of_tensors},
                "scheduled": scheduled,
            }
            tensors |= {tensor_key(key, name): value for name, value in of_tensors.items()}
    return records, tensors


def tensor_key(key: str, name: str) -> str:
    """By which a state tensor of a weight is saved."""
    return f"optimizer/{key}/{name}"


def _key_of(parameter: torch.Tensor, group: int, keys: Mapping[torch.Tensor, str]) -> str:
    if parameter not in keys:
        raise PipelineError(
            f"the optimizer's group {group} has a parameter of shape {list(parameter.shape)} that is none of this "
            f"rank's stages; give it pipeline.parameters() alone"
        )
    return keys[parameter]


def require_records(
    optimizer: Optimizer, keys: Mapping[torch.Tensor, str], records: Mapping[str, Record]
) -> list[Record | None]:
    """For each group the record of its weights, None where it is empty. Raises PipelineError where they do not fit."""
    found: list[Record | None] = []
    wanted = set()
    for index, group in enumerate(optimizer.param_groups):
        first, first_key = None, ""
        for parameter in group["params"]:
            key = _key_of(parameter, index, keys)
            wanted.add(key)
            if key not in records:
                raise PipelineError(f"{key} had no optimizer when it was saved; leave it out of this one as well")
            record = records[key]
            if record["optimizer"] != type(optimizer).__name__:
                raise PipelineError(f"saved with {record['optimizer']}, but this is {type(optimizer).__name__}")
            if first is not None:
                _require_one_group(index, (first_key, first), (key, record))
            first, first_key = first or record, first_key or key
        found.append(first)
    if left := [key for key in keys.values() if key in records and key not in wanted]:
        raise PipelineError(f"{left[0]} was in the optimizer when it was saved, but is not in this one; add it")
    return found


def _require_one_group(index: int, one: tuple[str, Record], other: tuple[str, Record]) -> None:
    for of in ("options", "scheduled"):
        was, now = one[1][of], other[1][of]
        if name := different(was, now):
            raise PipelineError(
                f"{one[0]} and {other[0]} are in one group, {index}, but were saved with different {name} "
                f"({was.get(name)} and {now.get(name)}); group the weights as when they were saved"
            )


def restore_optimizer(
    optimizer: Optimizer,
    keys: Mapping[torch.Tensor, str],
    records: Mapping[str, Record],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Set options and state. Not by `load_state_dict`, which converts state to the dtype of the weights."""
    optimizer.state.clear()
    for group, record in zip(optimizer.param_groups, require_records(optimizer, keys, records), strict=True):
        if record is not None:
            for name in [name for name in group if name not in _OF_THE_RANK]:
                del group[name]
            group.update(copy.deepcopy(record["options"]))
        for parameter in group["params"]:
            mine = records[keys[parameter]]
            state = {name: tensors[tensor_key(keys[parameter], name)] for name in mine["tensors"]}
            if state or mine["values"]:
                optimizer.state[parameter] = {**copy.deepcopy(mine["values"]), **state}


# --- schedulers -------------------------------------------------------------------------------------------------------


def split_scheduler(scheduler: Any, num_groups: int) -> tuple[Any, dict[Place, list[Any]]]:
    """A scheduler's state in what all ranks have alike, and what it has by group. (None, {}) without one."""
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

    return {"scheduler": type(scheduler).__name__, "state": common(scheduler.state_dict(), ())}, by_group


def restore_scheduler(scheduler: Any, saved: dict[str, Any], of_groups: list[Record | None]) -> None:
    """Set a scheduler's state; a group without weights keeps what it has."""
    state = copy.deepcopy(saved["state"])
    _, mine = split_scheduler(scheduler, len(of_groups))
    for place in {place for record in of_groups if record for place in record["scheduled"]}:
        own = mine.get(place, [None] * len(of_groups))
        values = [own[i] if record is None else record["scheduled"][place] for i, record in enumerate(of_groups)]
        *path, last = place
        inner = state
        for step in path:
            inner = inner[step]
        inner[last] = copy.deepcopy(values)
    scheduler.load_state_dict(state)


def require_scheduler(scheduler: Any, saved: dict[str, Any] | None) -> None:
    """Raises PipelineError unless the same kind of scheduler was saved, or none where there is none."""
    was = "no scheduler" if saved is None else saved["scheduler"]
    now = "no scheduler" if scheduler is None else type(scheduler).__name__
    if was != now:
        raise PipelineError(f"saved with {was}, but this rank's optimizer has {now}; give Checkpoints the same kind")


def different(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> Any:
    """The first key whose values differ, None if all are the same."""
    return next((key for key in {**a, **b} if key not in a or key not in b or not same(a[key], b[key])), None)


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal to the last bit, whatever tensors are inside."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping):
        return different(a, b) is None
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))
