"""verify: a split model against the unsplit one on one batch, in float64 and in the model's own dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, final

import torch
from torch import nn

from rota.core.errors import PipelineError
from rota.models import Stages
from rota.runtime import Pipeline
from rota.runtime.faults.watchdog import PATIENT
from rota.runtime.losses import LossFn
from rota.runtime.microbatches import num_examples
from rota.runtime.reducing.sharded_stages import refuse_wrapped
from rota.verifying import reasons
from rota.verifying.apart import ForComparison
from rota.verifying.comparing import compare_gradients, compare_outputs, places, relative
from rota.verifying.matching import Matching, equal_elements, match
from rota.verifying.probes import Probes
from rota.verifying.reasons import Watched
from rota.verifying.report import EXACT, Comparison, Verification
from rota.verifying.sides import ManyProcesses, OneProcess, Side, agreed
from rota.verifying.unsplit import GivenBatch, Outcome, Unsplit, by_microbatches, plain, whole

Against: TypeAlias = Literal["batch", "microbatches"]
_CANNOT_DRAW = (
    "the forward draws random numbers besides dropout, and the stages draw different ones from the unsplit model: give "
    "it fixed numbers while you verify"
)


def verify(
    stages: Stages | Pipeline,
    model: nn.Module | Callable[[], nn.Module] | None,
    batch: Any,
    targets: Any = None,
    loss_fn: LossFn | None = None,
    *,
    num_microbatches: int | None = None,
    fp64: bool = True,
    against: Against = "batch",
    report: Callable[[str], None] = lambda _: None,
) -> Verification:
    """Compare loss, outputs and every gradient of the split model with those of the unsplit one, on one batch.

    Stages run in this process, one after the other, with boundaries cut as a Pipeline does. A Pipeline runs its plan:
    call this on all its processes. The first one then also holds the unsplit model, with the stages' weights, and runs
    it on the batches of all replicas; the others hold nothing more than for a step. It runs on the device of the first
    process's stages. Dropout is switched off for both.

    Parameters, `.grad`, buffers and random states are left as they were. On a Pipeline, do not call it between steps
    with `sync=False`.

    Args:
        stages: The split model, or a Pipeline of it.
        model: The unsplit model, or a function that makes it. With a Pipeline only the first process uses it, and its
            weights are replaced by those of the stages.
        batch: The model's inputs: a tensor, a tuple, or a mapping of keyword arguments. With a Pipeline, what this
            process gives to `step`, or None if it gives nothing.
        targets: What `loss_fn` gets besides the output, as for `step`.
        loss_fn: As for `Pipeline`, whose own is the default; needed for Stages.
        num_microbatches: For Stages; default: 2, or 1 if the number of rows is odd. A Pipeline uses its plan's.
        fp64: Compare in float64, exact to 1e-10, and then in the model's own dtype, to the root of its rounding error.
            False: only the latter, as for stages that FSDP shards, and for models that cannot run in float64 (a note
            says so).
        against: "batch": the unsplit model runs on the whole batch; "microbatches": on one micro-batch after the
            other, which is what BatchNorm sees in any accumulation of gradients.
        report: Called with a line of text before each part of the work.

    Returns:
        The report; the same on all processes.

    Raises:
        PipelineError: The model or the stages cannot be run on this batch.
    """
    if against not in ("batch", "microbatches"):
        raise PipelineError(f"against is {against!r}; give 'batch' or 'microbatches'")
    given = GivenBatch(plain(batch), plain(targets))
    if isinstance(stages, Pipeline):
        loss = _needed(loss_fn or stages.loss_fn)
        with stages.watching("the other ranks to verify the model", PATIENT):
            return _Verifier(ManyProcesses(stages, given, loss), model, fp64, against, report).run()
    loss = _needed(loss_fn)
    refuse_wrapped(stages)
    if num_microbatches is None:
        num_microbatches = 2 if num_examples(given.inputs) % 2 == 0 else 1
    return _Verifier(OneProcess(stages, given, loss, num_microbatches), model, fp64, against, report).run()


def _needed(loss_fn: LossFn | None) -> LossFn:
    if loss_fn is None:
        raise PipelineError("there is no loss to make gradients from; give verify a loss_fn(output, target)")
    return loss_fn


@final
@dataclass
class _Verifier:
    """The comparison, on each process. Only the first process has the unsplit model and what it computes."""

    side: Side
    model: nn.Module | Callable[[], nn.Module] | None
    fp64: bool
    against: Against
    report: Callable[[str], None]

    def run(self) -> Verification:
        """Compare in each dtype, until one differs; find the reasons."""
        side = self.side
        notes: list[str] = []
        why: list[str] = []
        matching = self._matching()
        comparisons, parts = [], None
        dtypes: list[torch.dtype | None] = [torch.float64, None] if self.fp64 and not side.is_sharded else [None]
        if self.fp64 and side.is_sharded:
            notes.append("stages that fully_shard divides are compared in their own dtype only, not in float64")
        for dtype in dtypes:
            with ExitStack() as stack:
                stack.enter_context(side.apart(dtype))
                compared = self._compared(dtype, matching)
            if isinstance(compared, _CannotRun):
                notes.append(
                    f"compared in the model's own dtype only: the unsplit model in float64 fails, {compared.why}"
                )
                continue
            comparison, why, parts, more_notes = compared
            comparisons.append(comparison)
            notes += more_notes
            if not agreed(side, comparison.is_equal and not why):
                break
        why += agreed(side, self._other_weights(matching) if side.is_first else [])
        found = Verification(tuple(comparisons), parts, tuple(dict.fromkeys(why)), tuple(dict.fromkeys(notes)))
        return Verification.from_fields(agreed(side, found.to_fields() if side.is_first else {}))

    # --- what is compared -----------------------------------------------------------------------------------------

    def _matching(self) -> Matching:
        """Make the model on the first process; return on all processes how it corresponds to the stages."""
        return Matching.from_fields(self.side.first("matching the unsplit model and the stages", self._matched))

    def _matched(self) -> list[Any]:
        if not isinstance(self.model, nn.Module):
            if not callable(self.model):
                raise PipelineError(
                    f"model is a {type(self.model).__name__}; give the unsplit nn.Module, or a function that makes it, "
                    f"on the first process"
                )
            self.report("making the unsplit model")
            self.model = self.model()
        return match(self.model, self.side.stages).to_fields()

    def _other_weights(self, matching: Matching) -> list[str]:
        """A reason if the given model and the stages of this process have different weights."""
        if not isinstance(self.side, OneProcess):
            return []
        assert isinstance(self.model, nn.Module)
        given = dict(self.model.named_parameters())
        for parameter in matching.parameters:
            for stage, own in parameter.places:
                here, there = given[parameter.name], self.side.stages[stage].get_parameter(own)
                if here.is_meta or there.is_meta:
                    continue
                if here.shape != there.shape or not equal_elements(here, there.to(here.device)).all():
                    return [
                        f"{parameter.name!r} has different values in stage {stage} and in the unsplit "
                        f"model (those of the stages were compared): load both from the same checkpoint, or make both "
                        f"with the same seed"
                    ]
        return []

    def _compared(
        self, dtype: torch.dtype | None, matching: Matching
    ) -> tuple[Comparison, list[str], bool | None, list[str]] | _CannotRun:
        """In one dtype: the differences, the reasons, whether micro-batches agree, and the notes."""
        side = self.side
        in_float64 = dtype is torch.float64
        name = "float64" if in_float64 else "the model's own dtype"
        unsplit = self._made(dtype)
        self._fill(unsplit, matching)
        batches = [batch.in_dtype(dtype).on(side.device) for batch in side.batches()]
        done: dict[str, Any] = {}

        def run_unsplit() -> list[Any]:
            assert unsplit is not None
            self.report(f"{name}: the unsplit model")
            unsplit.refuse_empty()
            parts = whole(batches) if self.against == "batch" else by_microbatches(batches, side.num_microbatches)
            try:
                with ForComparison(False, in_float64):  # a forward may convert its weights, as NLLB-MoE's routers do
                    draws = any(unsplit.draws(part.inputs) for part in parts)
                with ForComparison(draws, in_float64):
                    still_draws = draws and any(unsplit.draws(part.inputs) for part in parts)
                    done["unsplit"] = unsplit.run(parts)
            except Exception as error:
                if not in_float64:
                    raise
                return [False, False, f"{type(error).__name__}: {error}"]
            return [draws, still_draws, None]

        draws, still_draws, failure = side.first("the unsplit model's step", run_unsplit)
        if failure is not None:
            return _CannotRun(" ".join(failure.split()))
        notes = ["dropout was switched off in both models"] if draws else []
        if unsplit is not None:
            notes += _not_finite(unsplit, done["unsplit"])
        with ForComparison(draws, in_float64):
            if side.is_first:
                self.report(f"{name}: the split model")
            loss, outputs = side.step(dtype)
            comparison = self._comparison(dtype, matching, unsplit, done.get("unsplit"), loss, outputs)
            if agreed(side, comparison.is_equal):
                found = [*reasons.untied(matching, side.is_sharded)]
                return comparison, found, None, notes
            why, parts = self._reasons(dtype, matching, unsplit, batches, comparison)
            return comparison, ([_CANNOT_DRAW] if still_draws else []) + why, parts, notes

    def _made(self, dtype: torch.dtype | None) -> Unsplit | None:
        """The copy of the unsplit model; None on all but the first process."""
        made: list[Unsplit] = []

        def make() -> None:
            assert isinstance(self.model, nn.Module)
            made.append(Unsplit(self.model, dtype, self.side.loss_fn, self.side.device))

        self.side.first("copying the unsplit model", make)
        return made[0] if made else None

    def _fill(self, unsplit: Unsplit | None, matching: Matching) -> None:
        """Copy the stages' values into the unsplit model."""
        matched = [each for each in (*matching.parameters, *matching.buffers) if each.places]
        values = self.side.tensors([each.places[0] for each in matched], of_gradient=False)
        for each, value in zip(matched, values, strict=True):
            if unsplit is not None and value is not None:
                unsplit.fill(each.name, value)

    def _comparison(
        self,
        dtype: torch.dtype | None,
        matching: Matching,
        unsplit: Unsplit | None,
        outcome: Outcome | None,
        loss: float,
        outputs: list[list[torch.Tensor]],
    ) -> Comparison:
        """The comparison on the first process; a placeholder on the others, which only send their gradients."""
        gradients = self.side.tensors(places(matching), of_gradient=True)
        if unsplit is None or outcome is None:
            for _ in gradients:
                pass
            return Comparison("", 0.0, 0.0, 0.0, 0.0, None, ())
        own = _own_dtype(unsplit.module)
        return Comparison(
            str(dtype or own).removeprefix("torch."),
            EXACT if dtype is torch.float64 else _rounding(own),
            outcome.loss,
            loss,
            relative(outcome.loss, loss),
            compare_outputs(outcome.outputs, outputs),
            compare_gradients(matching, unsplit, gradients),
        )

    # --- why they differ ------------------------------------------------------------------------------------------

    def _reasons(
        self,
        dtype: torch.dtype | None,
        matching: Matching,
        unsplit: Unsplit | None,
        batches: list[GivenBatch],
        comparison: Comparison,
    ) -> tuple[list[str], bool]:
        """The reasons, and whether the split model equals the unsplit one by micro-batches."""
        side, probes = self.side, Probes()
        done: list[Watched] = []

        def run_by_microbatches() -> list[str]:
            assert unsplit is not None
            self.report("not equal: the unsplit model on one micro-batch after the other, to see why")
            on_whole = Watched.run(unsplit, whole(batches)) if self.against == "batch" else None
            done.append(Watched.run(unsplit, by_microbatches(batches, side.num_microbatches)))
            return [] if on_whole is None else reasons.mixing(unsplit, on_whole, done[0], comparison.tolerance)

        mixed = side.first("the unsplit model's micro-batches", run_by_microbatches)
        of_process = {stage: matching.modules[stage] for stage in side.local_modules()}
        watched = [
            (there, side.local_modules()[stage].get_submodule(own))
            for stage, names in of_process.items()
            for own, there in names.items()
        ]
        with probes.on(watched):
            loss, outputs = side.step(dtype)
        by_parts = self._comparison(dtype, matching, unsplit, done[0].outcome if done else None, loss, outputs)
        is_equal = agreed(side, by_parts.is_equal)
        if is_equal:
            return mixed, True
        of_stages = side.gather(probes.seen)
        if unsplit is None:
            return [], False
        split = [
            *reasons.untied(matching, side.is_sharded),
            *reasons.missing(matching, by_parts.parameters, unsplit),
            *reasons.other_values(matching, done[0].probes, of_stages),
        ]
        return (mixed + split or [_unknown(comparison)]), False


class _CannotRun(NamedTuple):
    """In this dtype the unsplit model raises."""

    why: str


def _not_finite(unsplit: Unsplit, outcome: Outcome) -> list[str]:
    """A note if the comparison says little, as the unsplit model's numbers are not finite either."""
    gradients = [unsplit.gradient(name) for name, _ in unsplit.module.named_parameters()]
    num = sum(1 for gradient in gradients if gradient is not None and not gradient.isfinite().all())
    if math.isfinite(outcome.loss) and not num:
        return []
    return [
        f"the unsplit model's loss is {outcome.loss:.9g}, and {num} of its {len(gradients)} gradients have NaN or "
        f"infinite elements; the same ones in the split model count as equal. Verify on a batch with finite ones"
    ]


def _unknown(comparison: Comparison) -> str:
    worst = comparison.worst[0] if comparison.worst else None
    place = f" in stage {worst.stage}, at {worst.name!r}" if worst is not None and worst.stage is not None else ""
    return (
        f"the stages and the unsplit model compute different results{place}, although inputs and outputs of the "
        f"modules are equal: check the code between the modules, and loss_fn"
    )


def _rounding(own: torch.dtype) -> float:
    """How much equal models may differ; many compute in float32 inside, whatever their dtype."""
    return float(max(torch.finfo(own).eps, torch.finfo(torch.float32).eps) ** 0.5)


def _own_dtype(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.get_default_dtype())
