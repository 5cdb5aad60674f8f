"""The loss and the metrics of a step, over all ranks and replicas, in one message.

a mean                 weighted by its micro-batch's share, replicas equally       Σ share · loss / replicas
(sum, count)           divided by the count of all micro-batches and replicas    Σ sum / Σ count
{"loss": …, name: …}   the loss as above; numbers and pairs give `metrics`

On a queued device the row is made, added up over the ranks, and kept there, until somebody asks for the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeAlias, final

import torch
import torch.distributed as dist

from rota.core.errors import PipelineError
from rota.core.plan import Plan
from rota.runtime.device.numbers import Sums, read_numbers
from rota.runtime.device.protocol import Device, HostDevice, Number
from rota.runtime.json_messages import all_gather_json
from rota.runtime.losses import MicrobatchLoss, Weighed, ratio
from rota.runtime.meshes import Processes
from rota.runtime.transport import SUM, collective

Key: TypeAlias = tuple[str, bool]  # a metric's name, and whether it is made of pairs

# The places in the row that ranks add up; each metric has two more.
_MEANS, _SUMS, _COUNTS, _ADDED_MEANS, _ADDED_SUMS, *_REST = range(13)
_NO_COUNTS, _NO_ADDED_COUNTS, *_TALLIES, _STOPS, _NEW_NAMES = _REST  # the first two: numbers that are no counts
_HAVE_MEAN, _HAVE_COUNT, _ADDED_WITHOUT_COUNT, _ADDED_WITH_COUNT = _TALLIES
_NUM_PLACES = _NEW_NAMES + 1

#: What to do about a loss that is refused: before anything else is done with the step, and later.
AT_ONCE = "Do not apply the gradients of this step"
LATER = (
    "After begin_step the gradients of this step may have been applied already: go back to the last checkpoint, or to "
    "other weights from before this step"
)


@dataclass(frozen=True, slots=True)
class StepLoss:
    """Over all micro-batches and replicas: the loss, its count (None for a mean) and the metrics' means by name."""

    mean: float = math.nan  # that of a run without losses
    count: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class LocalLosses(NamedTuple):
    """What a rank knows of a step's losses.

    `losses` by micro-batch, those of them that are `counted` here, the losses that modules `added` by stage and
    micro-batch, and each micro-batch's share of a mean.
    """

    losses: Mapping[int, MicrobatchLoss]
    counted: Iterable[int]
    added: Mapping[tuple[int, int], list[Weighed]]
    shares: Sequence[float]


@final
@dataclass(slots=True, eq=False)
class Totals:
    """The sums of one step over all ranks, on the device or on their way from it."""

    _row: torch.Tensor
    _numbers: Callable[[], list[float]]
    _names: tuple[Key, ...]
    _num_pipelines: int
    _learn_names: Callable[[], dict[Key, tuple[float, float]]]

    @property
    def count(self) -> torch.Tensor:
        """The count of a loss that has one, a mean over replicas, as a tensor without dims. Does not wait."""
        return self._row[_COUNTS] / self._num_pipelines

    def read(self, remedy: str, *, together: bool) -> tuple[StepLoss, bool]:
        """The step's loss, and whether any rank asks to stop. Waits for the device.

        `remedy`: the end of an error's message. `together`: all ranks do it at once, as they must for new metrics.
        Raises PipelineError, on all ranks, if losses with and without counts are mixed, or if all counts are 0.
        """
        numbers = self._numbers()
        pairs = zip(numbers[_NUM_PLACES::2], numbers[_NUM_PLACES + 1 :: 2], strict=True)
        of_metrics = dict(zip(self._names, pairs, strict=True))
        if numbers[_NEW_NAMES]:
            if not together:
                raise PipelineError(
                    "loss_fn returns a metric in begin_step that it has not returned before, so the ranks "
                    f"do not know its name; return it in the first step too, or let this step wait. {remedy}"
                )
            of_metrics = self._learn_names()
        metrics = {name: ratio(*pair) for (name, _), pair in sorted(of_metrics.items()) if pair[1]}
        return _step_loss(numbers, self._num_pipelines, metrics, remedy), numbers[_STOPS] > 0


@final
class StepLosses:
    """Adds up the ranks' losses and metrics at the end of each step, in one message."""

    def __init__(self, plan: Plan, rank: int, processes: Processes, device: Device) -> None:
        placement, self._processes, self._device = plan.placement, processes, device
        #: The stages whose losses are counted here; a stage on several ranks is counted on the first.
        self._stages = {stage for stage in placement.stages_on(rank) if placement.ranks_of(stage)[0] == rank}
        #: The metrics that all ranks know, and their places in the row.
        self._names: tuple[Key, ...] = ()
        self._places: dict[Key, int] = {}

    def total(self, local: LocalLosses, asks_to_stop: bool, all_reduce: Callable[..., None]) -> Totals:
        """Add up the step's losses over all processes. Collective; does not wait for the device.

        `asks_to_stop`: whether this rank does. `all_reduce`: that of `StepResults`.
        """
        if local.added:
            added = {place: losses for place, losses in local.added.items() if place[0] in self._stages}
            local = local._replace(added=added)
        sums = _tally(local, _NUM_PLACES + 2 * len(self._names))
        known = sums.known
        known[_STOPS] = asks_to_stop
        for key, share, value, weight in _metrics(local):
            if (place := self._places.get(key)) is None:
                known[_NEW_NAMES] = 1.0
            else:
                sums.add(place, value, share)
                sums.add(place + 1, weight)
        row = sums.on(self._device)
        all_reduce(row, SUM, "waiting for the other ranks' losses")
        num_pipelines, learn_names = len(self._processes.pipelines), partial(self._learn_names, local)
        return Totals(row, self._device.read(row), self._names, num_pipelines, learn_names)

    def _learn_names(self, local: LocalLosses) -> dict[Key, tuple[float, float]]:
        """All ranks' metrics, gathered because some ranks have new names. Collective; waits for the device."""
        metrics = [*_metrics(local)]
        values = read_numbers([value for _, _, value, _ in metrics], self._device)
        weights = read_numbers([weight for *_, weight in metrics], self._device)
        here = [
            [*key, share * value, weight]
            for (key, share, _, _), value, weight in zip(metrics, values, weights, strict=True)
        ]
        totals: dict[Key, tuple[float, float]] = dict.fromkeys(self._names, (0.0, 0.0))
        for name, is_pair, total, weight in chain.from_iterable(all_gather_json(here, self._processes.everyone)):
            before = totals.get((name, is_pair), (0.0, 0.0))
            totals[name, is_pair] = before[0] + total, before[1] + weight
        self._names = tuple(sorted(totals))
        self._places = {key: _NUM_PLACES + 2 * i for i, key in enumerate(self._names)}
        for name, is_pair in self._names:
            if not is_pair and (name, True) in totals:
                raise PipelineError(
                    f"loss_fn returns the metric {name!r} as a number for some micro-batches and as (sum, count) for "
                    f"others; return one of the two for all"
                )
        return totals


def loss_of_parts(
    losses: Mapping[int, MicrobatchLoss], added: Mapping[tuple[int, int], list[Weighed]], shares: list[float]
) -> StepLoss:
    """The loss of micro-batches that one process ran on the CPU, without metrics; `added` is by stage and micro-batch.

    Raises PipelineError if losses with and without counts are mixed, or if all counts are 0.
    """
    sums = _tally(LocalLosses(losses, losses, added, shares), _NUM_PLACES).on(HostDevice())
    return _step_loss(sums.tolist(), 1, {}, AT_ONCE)


def _tally(local: LocalLosses, num_places: int) -> Sums:
    """What a rank adds to the sums over all ranks, without metrics."""
    losses, shares, sums = local.losses, local.shares, Sums(num_places)
    known = sums.known
    for m in local.counted:
        loss = losses.get(m)
        if loss is None:
            known[_MEANS] = math.nan
        elif loss.count is None:
            known[_HAVE_MEAN] += 1
            sums.add(_MEANS, loss.value, shares[m])
        else:
            sums.add(_SUMS, loss.value)
            sums.add(_COUNTS, loss.count)
            sums.add_if_no_count(_NO_COUNTS, loss.count)
            known[_HAVE_COUNT] += 1
    for (_, m), of_modules in local.added.items():
        for added in of_modules:
            if added.count is None:
                sums.add(_ADDED_MEANS, added.value, shares[m])
                known[_ADDED_WITHOUT_COUNT] += 1
            else:
                sums.add(_ADDED_SUMS, added.value, added.count)
                sums.add_if_no_count(_NO_ADDED_COUNTS, added.count)
                known[_ADDED_WITH_COUNT] += 1
    return sums


def _step_loss(numbers: list[float], num_pipelines: int, metrics: dict[str, float], remedy: str) -> StepLoss:
    """The loss from the sums over all ranks."""
    if numbers[_HAVE_MEAN] and numbers[_HAVE_COUNT]:
        raise PipelineError(
            f"loss_fn returns a mean for some micro-batches and (sum, count) for others; return one of the two for "
            f"all. {remedy}"
        )
    for place, what in ((_NO_COUNTS, "loss_fn returned"), (_NO_ADDED_COUNTS, "rota.add_loss got")):
        if numbers[place]:
            times = f"{numbers[place]:.0f} time{'s' if numbers[place] > 1 else ''}"
            raise PipelineError(
                f"{what} a count that is negative or not finite, {times} in all micro-batches; give a finite number of "
                f"0 or more. {remedy}"
            )
    if not numbers[_HAVE_COUNT]:
        if numbers[_ADDED_WITH_COUNT] and numbers[_HAVE_MEAN]:
            raise PipelineError(
                f"rota.add_loss was given a count, but loss_fn returns a mean; leave the count out, or let loss_fn "
                f"return (sum, count). {remedy}"
            )
        mean = (numbers[_MEANS] + numbers[_ADDED_MEANS]) / num_pipelines
        return StepLoss(mean, None, metrics)
    if numbers[_ADDED_WITHOUT_COUNT]:
        raise PipelineError(
            f"rota.add_loss was given no count, but loss_fn returns (sum, count), so the weight of the "
            f"added loss is not known; give rota.add_loss(value, count=…), such as the number of tokens in the "
            f"micro-batch. {remedy}"
        )
    if not numbers[_COUNTS]:
        raise PipelineError(
            f"loss_fn returned (sum, count) with a count of 0 for every micro-batch, so there is nothing to divide "
            f"by; leave out a batch in which every target is ignored. {remedy}"
        )
    total = numbers[_SUMS] + numbers[_ADDED_SUMS] + numbers[_MEANS]  # the last is nan if a loss is missing, else 0
    return StepLoss(total / numbers[_COUNTS], numbers[_COUNTS] / num_pipelines, metrics)


def _metrics(local: LocalLosses) -> Iterator[tuple[Key, float, Number, Number]]:
    """Each micro-batch's metrics: which one, what its value is multiplied by, the value, and the weight."""
    for m in local.counted:
        for name, metric in local.losses[m].metrics.items() if m in local.losses else ():
            if metric.count is None:
                yield (name, False), local.shares[m], metric.value, local.shares[m]
            else:
                yield (name, True), 1.0, metric.value, metric.count


# --- losses that are not finite ---------------------------------------------------------------------------------------


def refuse_loss(
    mean: float,
    step: int,
    name: str,
    by_stage: dict[int, dict[int, float]],
    empty: list[int],
    group: dist.ProcessGroup | None,
) -> None:
    """Refuse a mean loss that is not finite. Collective. Raises PipelineError with all losses that are not finite.

    `name`: of this process. `by_stage`: the losses that it counts, by last stage, then by micro-batch. `empty`: the
    micro-batches without rows, as it was given them. `group`: all processes; None: refuse it only on this rank, in
    begin_step.
    """
    words = "; ".join(filter(None, (_nonfinite_text(name, stage, losses) for stage, losses in by_stage.items())))
    means_of_none = [m for losses in by_stage.values() for m in losses if m in empty and math.isnan(losses[m])]
    of_ranks: list[Any] = [[words, means_of_none]]
    if group is not None:
        with collective("gathering losses that are not finite"):
            of_ranks = all_gather_json(of_ranks[0], group)
    where = "; ".join(words for words, _ in of_ranks if words)
    cause = _without_rows([m for _, microbatches in of_ranks for m in microbatches])
    if group is not None:
        where = where or "each micro-batch's is finite, but their sum is not"
        cause = cause or "reload the last checkpoint or lower the learning rate"
        then = f"Do not apply its gradients: {cause}; to go on without this batch, set the gradients to None"
    else:
        is_known = any(by_stage.values())
        elsewhere = "the ranks of the last stage say for which micro-batches"
        where = where or ("each micro-batch's is finite here, but the sum over all is not" if is_known else elsewhere)
        then = f"{LATER}; {cause or 'lower the learning rate'}"
    raise PipelineError(
        f"step {step}: the mean loss is {mean} ({where}). {then}; to be given such losses, use "
        f"Pipeline(…, allow_nonfinite_loss=True) or a GradScaler"
    )


def _without_rows(microbatches: list[int]) -> str:
    """What to do about micro-batches without rows; "" if there are none."""
    if not microbatches:
        return ""
    return (
        f"{_listed(microbatches)} had no rows, so their mean is nan: give each micro-batch a row or more, or let "
        f"loss_fn return output.sum() * 0 where there are none"
    )


def _nonfinite_text(name: str, stage: int, losses: dict[int, float]) -> str:
    by_value: dict[str, list[int]] = {}
    for microbatch, loss in losses.items():
        if not math.isfinite(loss):
            by_value.setdefault(str(loss), []).append(microbatch)
    values = ", ".join(f"{value} for {_listed(microbatches)}" for value, microbatches in by_value.items())
    return values and f"{values} at stage {stage} on {name}"


def _listed(microbatches: list[int]) -> str:
    return f"micro-batch{'es' if len(microbatches) > 1 else ''} {', '.join(map(str, microbatches))}"
