"""Why a split model is not exact: what mixes the rows of a batch, and where the stages first differ from the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from rota.verifying.comparing import compare_gradients, compare_outputs, relative
from rota.verifying.matching import Matched, Matching
from rota.verifying.probes import Probes, Seen, differ, leaves, mean, rows_differ
from rota.verifying.report import EXACT, ParameterDifference, largest_of
from rota.verifying.unsplit import Outcome, Part, Unsplit

_EQUAL = 100 * EXACT  # for sums of many numbers
_IGNORED = -100  # by PyTorch's cross entropy
_MOST = 3  # modules in a report
_BY_MICROBATCHES = "compare with against='microbatches' (`rota verify --against microbatches`)"
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


# --- the batch: the unsplit model itself differs when it is run by micro-batches --------------------------------------


class Watched(NamedTuple):
    """A run of the unsplit model by parts: what came out, what its modules got and returned, and its gradients."""

    parts: list[Part]
    outcome: Outcome
    probes: Probes
    gradients: dict[str, torch.Tensor | None]

    @classmethod
    def run(cls, unsplit: Unsplit, parts: list[Part]) -> Watched:
        """Run the model."""
        probes = Probes(by_rows=True)
        with probes.on([(name, module) for name, module in unsplit.module.named_modules() if name]):
            outcome = unsplit.run(parts)
        names = [name for name, _ in unsplit.module.named_parameters()]
        return cls(parts, outcome, probes, {name: unsplit.gradient(name) for name in names})


def mixing(unsplit: Unsplit, whole: Watched, by_microbatches: Watched, tolerance: float) -> list[str]:
    """Why the unsplit model computes different results on the whole batch and on its micro-batches, the last run."""
    on_whole, on_parts = whole.outcome, by_microbatches.outcome
    as_split = Matching([Matched(name, ((0, name),), False) for name in whole.gradients], [], [], [])
    differences = compare_gradients(as_split, unsplit, whole.gradients.values())
    of_loss = relative(on_whole.loss, on_parts.loss)
    if largest_of([of_loss, *(difference.relative for difference in differences)]) <= tolerance:
        return []
    of_outputs = compare_outputs(on_whole.outputs, on_parts.outputs)
    equal = max(tolerance, _EQUAL)
    if of_outputs is not None and of_outputs <= equal:
        return _of_loss(on_whole, on_parts, by_microbatches.parts, equal)
    modules = dict(unsplit.module.named_modules())
    names = _mixing_modules(whole.probes, by_microbatches.probes, len(whole.parts), len(by_microbatches.parts))
    if names:
        more = [f"{len(names) - _MOST} more modules mix rows"] if len(names) > _MOST else []
        return [_of_module(name, modules[name]) for name in names[:_MOST]] + more
    if of_outputs is None:
        return _of_loss(on_whole, on_parts, by_microbatches.parts, equal)
    return ["the model's own forward, outside of its modules, mixes the rows of a batch"]


def _mixing_modules(on_whole: Probes, on_parts: Probes, num_whole: int, num_parts: int) -> list[str]:
    """The modules whose output changes with the micro-batches although their inputs do not; innermost ones only."""
    names: list[str] = []
    for name, where in on_whole.order:
        if not where.startswith("out") or name in names or any(inner.startswith(f"{name}.") for inner in names):
            continue
        whole, parts = on_whole.rows[name], on_parts.rows.get(name, {})
        calls = _calls_per_run(whole, num_whole)
        if calls != _calls_per_run(parts, num_parts) or whole.keys() != parts.keys():
            calls = 1  # all of them together
        for call in range(calls):
            of_call = slice(call, None, calls)
            changed = {path for path in whole if rows_differ(whole[path][of_call], parts.get(path, [])[of_call])}
            if where in changed and not any(path.startswith("in ") for path in changed):
                names.append(name)
                break
    return names


def _calls_per_run(rows: dict[str, list[Any]], num_runs: int) -> int:
    """How often a module was called in each run; 1 if that is not the same for all runs, inputs and outputs."""
    calls = {len(rows_of_calls) for rows_of_calls in rows.values()}
    per_run, remainder = divmod(max(calls, default=0), num_runs)
    return per_run if len(calls) == 1 and not remainder else 1


def _of_module(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    if isinstance(module, _BATCH_NORMS):
        return (
            f"{kind} {name!r} takes its statistics over the rows of a micro-batch, not of the batch, as in any "
            f"accumulation of gradients. Put all of its kind in eval(), use GroupNorm or LayerNorm, or "
            f"{_BY_MICROBATCHES}"
        )
    return (
        f"{kind} {name!r} mixes the rows of a batch, so its results on micro-batches differ. Use a layer that computes "
        f"each row by itself (as GroupNorm and LayerNorm do, or BatchNorm in eval()), or {_BY_MICROBATCHES}"
    )


def _of_loss(whole: Outcome, parts: Outcome, parts_run: list[Part], tolerance: float) -> list[str]:
    """The outputs are the same row by row, so it is the loss, or what modules add to it."""
    loss, loss_by_parts = whole.loss_without_added, parts.loss_without_added
    added, added_by_parts = whole.loss - loss, parts.loss - loss_by_parts
    reasons = []
    if abs(added - added_by_parts) > tolerance * abs(whole.loss):
        reasons.append(
            f"a loss that modules add by rota.add_loss is not a mean over rows, such as a balancing loss of experts: "
            f"it is {added:.9g} on the whole batch and {added_by_parts:.9g} on the micro-batches. Accept it, as in any "
            f"accumulation of gradients: compare with against='microbatches'"
        )
    if relative(loss, loss_by_parts) > tolerance or not reasons:
        reasons.append(_of_loss_fn(whole, parts, parts_run, tolerance))
    return reasons


def _of_loss_fn(whole: Outcome, parts: Outcome, parts_run: list[Part], tolerance: float) -> str:
    on_whole = whole.loss_without_added
    if any(loss.count is not None for loss in parts.losses):
        return (
            f"loss_fn's sums and counts do not add up: for the whole batch they are {_sum_and_count(whole)}; for "
            f"all its micro-batches {_sum_and_count(parts)}. Return a sum over tokens, not a mean, and their number. "
            f"A loss that compares the rows of a batch, as a contrastive loss does, has no such sum"
        )
    total, of_parts = (sum(float(loss.value) for loss in outcome.losses) for outcome in (whole, parts))
    losses = _listed(f"{loss.value:.9g}" for loss in parts.losses)
    if relative(total, of_parts) <= tolerance:
        return (
            f"loss_fn's losses of the micro-batches, {losses}, sum to that of the whole batch, {total:.9g}, but a "
            f"step takes their mean. So loss_fn returns a sum, or divides one by a number of the whole batch, such as "
            f"transformers' num_items_in_batch: let it return (sum, count), each of its micro-batch"
        )
    for name, counts in _token_counts(parts_run):
        if not any(counts):
            continue
        shares = [count / sum(counts) for count in counts]
        weighted = sum(share * float(loss.value) for share, loss in zip(shares, parts.losses, strict=True) if share)
        weighs_otherwise = any(
            relative(part.share, share) > _EQUAL for part, share in zip(parts_run, shares, strict=True)
        )
        if weighs_otherwise and relative(on_whole, weighted) <= tolerance:
            return (
                f"loss_fn takes the mean over tokens, and the micro-batches have {_listed(counts)} of them ({name}): "
                f"the mean of their means is not the mean over all tokens, {on_whole:.9g}. Let loss_fn return (sum, "
                f"count)"
            )
    return (
        f"loss_fn is not a mean over rows: from equal outputs it makes {on_whole:.9g} for the whole batch and "
        f"{losses} for the micro-batches. If it is a mean over a part of them, such as those of a mask, let it return "
        f"(sum, count); if it compares or mixes rows, as a contrastive loss does, {_BY_MICROBATCHES}"
    )


def _sum_and_count(outcome: Outcome) -> str:
    return f"({sum(loss.value for loss in outcome.losses):.9g}, {sum(loss.count or 0 for loss in outcome.losses):g})"


def _token_counts(parts: list[Part]) -> Iterator[tuple[str, list[int]]]:
    """What a loss may count in each part: labels that are not ignored, perhaps without those of the first position."""
    for what in ("targets", "inputs"):
        columns = [dict(leaves(what, getattr(part, what))) for part in parts]
        for path in columns[0]:
            tensors = [tensor for column in columns if (tensor := column.get(path)) is not None]
            if len(tensors) == len(columns):
                yield f"{path} that are not {_IGNORED}", [int((t != _IGNORED).sum()) for t in tensors]
                if all(tensor.dim() > 1 for tensor in tensors):
                    counts = [int((t[:, 1:] != _IGNORED).sum()) for t in tensors]
                    yield f"{path} without the first column that are not {_IGNORED}", counts


# --- the split: the stages differ from the unsplit model on the same micro-batches ------------------------------------


def untied(matching: Matching, is_sharded: bool) -> Iterator[str]:
    """Weights that the unsplit model shares, and of which stages have several."""
    for parameter in matching.parameters:
        if parameter.is_untied:
            stages = " and ".join(dict.fromkeys(f"stage {stage}" for stage, _ in parameter.places))
            why = "fully_shard replaces parameters, which cuts ties" if is_sharded else "they are copies"
            yield (
                f"{parameter.name!r} is one weight in the unsplit model, but {stages} each have their own ({why}), so "
                f"each gets a part of its gradient: give both the same nn.Parameter, and do not shard it"
            )


def missing(matching: Matching, differences: Iterable[ParameterDifference], unsplit: Unsplit) -> Iterator[str]:
    """Parameters that no stage has, and those that have a gradient in only one of the two models."""
    unknown = {*matching.unknown}
    for name, stage in (
        (parameter.name, parameter.stage) for parameter in differences if parameter.relative == math.inf
    ):
        if (stage, name) in unknown:
            yield f"stage {stage} trains {name!r}, which the unsplit model does not have"
        elif stage is None:
            yield f"no stage has the parameter {name!r}, which the unsplit model trains"
        elif unsplit.gradient(name) is not None:
            yield (
                f"{name!r} gets no gradient in stage {stage}: the stage does not use it, or detach() or no_grad() cuts "
                f"it off from the loss"
            )
        else:
            yield f"{name!r} has a gradient in stage {stage}, but none in the unsplit model, which does not use it"


def other_values(matching: Matching, probes: Probes, of_stages: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The first module whose inputs or outputs differ between its stage and the unsplit model."""
    stage_of = {name: stage for stage, names in enumerate(matching.modules) for name in names.values()}
    seen: dict[str, Seen] = {}
    for of_process in of_stages:
        seen |= of_process
    for name, where in probes.order:
        if name not in seen or name not in stage_of:
            continue
        expected, actual = probes.seen[name][where], seen[name].get(where)
        if where not in seen[name] and not where.startswith("in "):
            continue
        if expected is None and actual is None:  # or the stage leaves out an argument that is None by default
            continue
        if expected is None or actual is None or differ(mean(expected), mean(actual)):
            yield _of_value(name, where, stage_of[name], expected, actual)
            return


def _of_value(name: str, where: str, stage: int, expected: list[float] | None, actual: list[float] | None) -> str:
    if not where.startswith("in "):
        return (
            f"{name!r} of stage {stage} returns another result than in the unsplit model, from equal inputs: check "
            f"its training mode, its buffers, and random numbers that it draws"
        )
    argument = where.removeprefix("in ")
    got = "None, where the unsplit model passes a tensor" if actual is None else "different values"
    got = "a tensor, where the unsplit model passes None" if expected is None else got
    return f"{name!r} of stage {stage} gets a different {argument!r} than in the unsplit model: {got}"


def _listed(values: Iterable[object]) -> str:
    texts = [*map(str, values)]
    return ", ".join(texts[:8]) + (", …" if len(texts) > 8 else "")
