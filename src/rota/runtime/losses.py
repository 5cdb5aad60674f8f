"""What `loss_fn` returns for a micro-batch, and the loss and the metrics of a step, over all ranks and replicas.

a mean                 weighted by its micro-batch's share, replicas equally       Σ share · loss / replicas
(sum, count)           divided by the count of all micro-batches and replicas    Σ sum / Σ count
{"loss": …, name: …}   the loss as above; numbers and pairs give `metrics`
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from itertools import chain
from typing import Any, TypeAlias, final

import torch
import torch.distributed as dist

from rota.errors import PipelineError
from rota.plan import Plan
from rota.runtime.json_messages import all_gather_json
from rota.runtime.messages import tensors_in

#: `loss_fn(output, target)`, or `loss_fn(output)` for a model that returns its own loss.
LossFn: TypeAlias = Callable[..., Any]

_FORMS = "a mean loss, (sum, count), or a dict with one of them as 'loss' and metrics beside it"


@dataclass(frozen=True, slots=True)
class Weighed:
    """A mean, or a sum with its count; for an added loss, a mean and the part of the loss's count that it is for."""

    value: float
    count: float | None = None


@dataclass(frozen=True, slots=True)
class MicrobatchLoss:
    """The loss of a micro-batch as `loss_fn` returned it, and its metrics."""

    value: float
    count: float | None
    metrics: dict[str, Weighed]

    @property
    def mean(self) -> float:
        """The micro-batch's own mean loss; nan if its count is 0."""
        return self.value if self.count is None else _ratio(self.value, self.count)


def needs_target(loss_fn: LossFn) -> bool:
    """Whether `loss_fn` can take a target; if it takes the output alone, the output has the loss."""
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):  # some functions written in C have no signature
        return True
    by_position = [
        one for one in parameters if one.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]
    return len(by_position) != 1 or any(one.kind is Parameter.VAR_POSITIONAL for one in parameters)


def loss_of(
    loss_fn: LossFn, output: Any, target: Any, takes_target: bool | None = None
) -> tuple[torch.Tensor, MicrobatchLoss]:
    """What the backward starts from, and its numbers. `takes_target`: what `needs_target` says; None: ask it.

    Raises:
        PipelineError: `loss_fn` returns something else, or a loss without gradient for an output that has one.
    """
    if takes_target is None:
        takes_target = needs_target(loss_fn)
    returned = loss_fn(output, target) if takes_target else loss_fn(output)
    metrics: dict[str, Weighed] = {}
    if isinstance(returned, Mapping):
        if "loss" not in returned:
            raise PipelineError(f"loss_fn returned a dict with {[*returned]}; add 'loss' to it: {_FORMS}")
        metrics = {str(name): _metric(name, value) for name, value in returned.items() if name != "loss"}
        returned = returned["loss"]
    count = None
    if isinstance(returned, tuple):
        if len(returned) != 2:
            raise PipelineError(f"loss_fn returned a tuple of {len(returned)}; it must return {_FORMS}")
        returned, count = returned[0], _number("the count that loss_fn returned", returned[1])
        if not 0 <= count < math.inf:
            raise PipelineError(f"loss_fn returned the count {count:g}; give a finite number of 0 or more")
    if not isinstance(returned, torch.Tensor) or returned.numel() != 1:
        got = f"shape {list(returned.shape)}" if isinstance(returned, torch.Tensor) else type(returned).__name__
        raise PipelineError(
            f"loss_fn returned {got}; it must return a tensor with one element, the mean loss: {_FORMS}"
        )
    if returned.is_complex():
        raise PipelineError("loss_fn returned a complex tensor; it must return a real one, the mean loss")
    if not returned.requires_grad and any(tensor.requires_grad for tensor in tensors_in(output)):
        raise PipelineError(
            "loss_fn returned a loss without gradient for an output that has one; leave out detach(), item() and "
            "no_grad() in it, or use evaluate"
        )
    return returned, MicrobatchLoss(number_in(returned), count, metrics)


def number_in(value: torch.Tensor) -> float:
    """The number in a tensor with one element; nan if the model runs without data, on meta."""
    return math.nan if value.is_meta else float(value.item())


def _number(what: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return number_in(value)
    if isinstance(value, (bool, int, float)):
        return float(value)
    got = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise PipelineError(f"{what} is {got}; give a number, or a tensor with one element")


def _metric(name: Any, value: Any) -> Weighed:
    what = f"the metric {name!r} that loss_fn returned"
    if isinstance(value, tuple) and len(value) == 2:
        return Weighed(_number(what, value[0]), _number(f"the count of {what}", value[1]))
    return Weighed(_number(what, value))


def _ratio(total: float, count: float) -> float:
    return total / count if count else math.nan


# --- a step -----------------------------------------------------------------------------------------------------------

# The places in the row that ranks add up.
_MEANS, _SUMS, _COUNTS, _ADDED_MEANS, _ADDED_SUMS, *_TALLIES, _STOPS, _NEW_NAMES = range(11)
_HAVE_MEAN, _HAVE_COUNT, _ADDED_WITHOUT_COUNT, _ADDED_WITH_COUNT = _TALLIES


@dataclass(frozen=True, slots=True)
class StepLoss:
    """Over all micro-batches and replicas: the loss, its count (None for a mean) and the metrics' means by name."""

    mean: float
    count: float | None
    metrics: dict[str, float]

    @classmethod
    def none(cls) -> StepLoss:
        """The result of a run without losses."""
        return cls(math.nan, None, {})


@final
class StepLosses:
    """Adds up the ranks' losses and metrics at the end of each step, in one message."""

    def __init__(self, plan: Plan, rank: int, num_pipelines: int) -> None:
        placement = plan.placement
        self._num_pipelines = num_pipelines
        #: The stages whose losses are counted here; a stage on several ranks is counted on the first.
        self._stages = {stage for stage in placement.stages_on(rank) if placement.ranks_of(stage)[0] == rank}
        #: The metrics that all ranks know, and whether each is made of pairs.
        self._names: tuple[tuple[str, bool], ...] = ()

    def total(
        self,
        losses: Mapping[int, MicrobatchLoss],
        counted: Iterable[int],
        added: Mapping[tuple[int, int], list[Weighed]],
        shares: list[float],
        asks_to_stop: bool,
        add_up: Callable[[torch.Tensor], None],
        everyone: dist.ProcessGroup,
    ) -> tuple[StepLoss, bool]:
        """The step's loss, and whether any rank asks to stop. Collective.

        Args:
            losses: this rank's losses by micro-batch.
            counted: the micro-batches whose loss this rank counts.
            added: the losses that modules added, by stage and micro-batch.
            shares: each micro-batch's share of a mean.
            asks_to_stop: whether this rank asks to stop.
            add_up: sums a tensor over all processes.
            everyone: all processes.

        Raises:
            PipelineError: on all ranks, if losses with and without counts are mixed, or all counts are 0.
        """
        mine = _tally(losses, counted, {key: of for key, of in added.items() if key[0] in self._stages}, shares)
        mine[_STOPS] = asks_to_stop
        metrics = _metrics(losses, counted, shares)
        mine[_NEW_NAMES] = not {*metrics} <= {*self._names}
        mine += chain.from_iterable(metrics.get(name, (0.0, 0.0)) for name in self._names)
        sums = torch.tensor(mine, dtype=torch.float64)
        add_up(sums)
        totals = sums.tolist()
        pairs = zip(totals[_NEW_NAMES + 1 :: 2], totals[_NEW_NAMES + 2 :: 2], strict=True)
        of_metrics = dict(zip(self._names, pairs, strict=True))
        if totals[_NEW_NAMES]:
            of_metrics = self._learn_names(metrics, everyone)
        metrics_of_step = {name: _ratio(*pair) for (name, _), pair in sorted(of_metrics.items()) if pair[1]}
        return _step_loss(totals, self._num_pipelines, metrics_of_step), totals[_STOPS] > 0

    def _learn_names(
        self, metrics: dict[tuple[str, bool], tuple[float, float]], everyone: dist.ProcessGroup
    ) -> dict[tuple[str, bool], tuple[float, float]]:
        """All ranks' metrics, gathered because some ranks have new names. Collective."""
        of_ranks = all_gather_json([[*key, *value] for key, value in metrics.items()], everyone)
        found: dict[tuple[str, bool], tuple[float, float]] = dict.fromkeys(self._names, (0.0, 0.0))
        for name, is_pair, total, weight in chain.from_iterable(of_ranks):
            before = found.get((name, is_pair), (0.0, 0.0))
            found[name, is_pair] = before[0] + total, before[1] + weight
        self._names = tuple(sorted(found))
        for name, is_pair in self._names:
            if not is_pair and (name, True) in found:
                raise PipelineError(
                    f"loss_fn returns the metric {name!r} as a number for some micro-batches and as (sum, count) for "
                    f"others; return one of the two for all"
                )
        return found


def loss_of_parts(
    losses: Mapping[int, MicrobatchLoss], added: Mapping[tuple[int, int], list[Weighed]], shares: list[float]
) -> StepLoss:
    """The loss of micro-batches that one process ran, without metrics; `added` is by stage and micro-batch.

    Raises:
        PipelineError: losses with and without counts are mixed, or all counts are 0.
    """
    return _step_loss(_tally(losses, losses, added, shares), 1, {})


def _tally(
    losses: Mapping[int, MicrobatchLoss],
    counted: Iterable[int],
    added: Mapping[tuple[int, int], list[Weighed]],
    shares: list[float],
) -> list[float]:
    """What a rank adds to the sums over all ranks."""
    mine = [0.0] * (_NEW_NAMES + 1)
    for m in counted:
        loss = losses.get(m)
        if loss is None:
            mine[_MEANS] = math.nan
        elif loss.count is None:
            mine[_MEANS] += shares[m] * loss.value
            mine[_HAVE_MEAN] += 1
        else:
            mine[_SUMS] += loss.value
            mine[_COUNTS] += loss.count
            mine[_HAVE_COUNT] += 1
    for (_, m), of_modules in added.items():
        for each in of_modules:
            if each.count is None:
                mine[_ADDED_MEANS] += shares[m] * each.value
                mine[_ADDED_WITHOUT_COUNT] += 1
            else:
                mine[_ADDED_SUMS] += each.count * each.value
                mine[_ADDED_WITH_COUNT] += 1
    return mine


def _step_loss(totals: list[float], num_pipelines: int, metrics: dict[str, float]) -> StepLoss:
    """The loss from the sums over all ranks."""
    if totals[_HAVE_MEAN] and totals[_HAVE_COUNT]:
        raise PipelineError(
            "loss_fn returns a mean for some micro-batches and (sum, count) for others; return one of the two for "
            "all. Do not apply the gradients of this step"
        )
    if not totals[_HAVE_COUNT]:
        if totals[_ADDED_WITH_COUNT] and totals[_HAVE_MEAN]:
            raise PipelineError(
                "rota.add_loss was given a count, but loss_fn returns a mean; leave the count out, or let loss_fn "
                "return (sum, count). Do not apply the gradients of this step"
            )
        mean = (totals[_MEANS] + totals[_ADDED_MEANS]) / num_pipelines
        return StepLoss(mean, None, metrics)
    if totals[_ADDED_WITHOUT_COUNT]:
        raise PipelineError(
            "rota.add_loss was given no count, but loss_fn returns (sum, count), so the weight of the "
            "added loss is not known; give rota.add_loss(value, count=…), such as the number of tokens in the "
            "micro-batch. Do not apply the gradients of this step"
        )
    if not totals[_COUNTS]:
        raise PipelineError(
            "loss_fn returned (sum, count) with a count of 0 for every micro-batch, so there is nothing to divide "
            "by; leave out a batch in which every target is ignored. Do not apply the gradients of this step"
        )
    total = totals[_SUMS] + totals[_ADDED_SUMS] + totals[_MEANS]  # the last is nan if a loss is missing, else 0
    return StepLoss(total / totals[_COUNTS], totals[_COUNTS] / num_pipelines, metrics)


def _metrics(
    losses: Mapping[int, MicrobatchLoss], counted: Iterable[int], shares: list[float]
) -> dict[tuple[str, bool], tuple[float, float]]:
    """By name, and whether it is made of pairs: the weighted sum, and the weights."""
    found: dict[tuple[str, bool], tuple[float, float]] = {}
    for m in counted:
        for name, metric in losses[m].metrics.items() if m in losses else ():
            key = name, metric.count is not None
            share, weight = (shares[m], shares[m]) if metric.count is None else (1.0, metric.count)
            before = found.get(key, (0.0, 0.0))
            found[key] = before[0] + share * metric.value, before[1] + weight
    return found
