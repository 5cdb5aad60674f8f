"""verify: a split model against the unsplit one on one batch, in float64 and in the model's own dtype."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, final

import msgspec
import torch
from torch import nn

from rota.core.errors import PipelineError, error_line
from rota.models import Stages
from rota.runtime import Pipeline
from rota.runtime.faults.watchdog import PATIENT
from rota.runtime.json_messages import all_gather_json, broadcast_json
from rota.runtime.losses import LossFn, needs_target
from rota.runtime.microbatches import num_examples
from rota.runtime.process_group import on_first
from rota.verifying import reasons
from rota.verifying.apart import ForComparison
from rota.verifying.comparing import compare_gradients, compare_outputs, places, relative
from rota.verifying.matching import Matching, equal_elements, match
from rota.verifying.probes import Probes
from rota.verifying.reasons import Watched
from rota.verifying.report import EXACT, Comparison, Verification
from rota.verifying.split_model import SplitModel, pipeline_of
from rota.verifying.unsplit import Batch, Outcome, Unsplit, by_microbatches, plain, whole

_LOG = logging.getLogger("rota.verifying")

Against: TypeAlias = Literal["batch", "microbatches"]
_CANNOT_DRAW = (
    "the forward draws random numbers besides dropout, and the stages draw different ones from the unsplit model: give "
    "it fixed numbers while you verify"
)


def verify(
    stages: Stages | Pipeline,
    batch: Any,
    targets: Any = None,
    loss_fn: LossFn | None = None,
    *,
    num_microbatches: int | None = None,
    fp64: bool = True,
    against: Against = "batch",
) -> Verification:
    """Compare loss, outputs and every gradient of the split model with those of the unsplit one, on one batch.

    The unsplit model is `stages.unsplit`, which `rota.split` sets. For stages made by hand, set it to the model, or to
    a function that makes it, before a Pipeline is made.

    Stages run in this process, one after the other, in a Pipeline of one rank. A Pipeline runs its plan: call this on
    all its processes. The first one then also holds the unsplit model, with the stages' weights, and runs it on the
    batches of all replicas; the others hold nothing more than for a step. It runs on the device of the first process's
    stages. Dropout is switched off for both.

    Parameters, `.grad`, buffers and random states are left as they were. On a Pipeline, do not call it between steps
    with `sync=False`. Progress is logged by `rota.verifying`.

    Args:
        stages: The split model, or a Pipeline of it.
        batch: The model's inputs: a tensor, a tuple, or a mapping of keyword arguments; or a list of micro-batches,
            which are compared one by one. With a Pipeline, what this process gives to `step`, or None if it gives
            nothing.
        targets: What `loss_fn` gets besides the output, as for `step`.
        loss_fn: As for `Pipeline`, whose own is the default; needed for Stages.
        num_microbatches: For Stages; default: 2, or 1 if the number of rows is odd. A Pipeline uses its plan's.
        fp64: Compare in float64, exact to 1e-10, and then in the model's own dtype, to the root of its rounding error.
            False: only the latter, as for stages that FSDP shards, and for models that cannot run in float64 (a note
            says so).
        against: "batch": the unsplit model runs on the whole batch; "microbatches": on one micro-batch after the
            other, which is what BatchNorm sees in any accumulation of gradients.

    Returns:
        The report; the same on all processes.

    Raises:
        PipelineError: The model or the stages cannot be run on this batch.
    """
    if against not in ("batch", "microbatches"):
        raise PipelineError(f"against is {against!r}; give 'batch' or 'microbatches'")
    loss = loss_fn or (stages.loss_fn if isinstance(stages, Pipeline) else None)
    if loss is None:
        raise PipelineError("there is no loss to make gradients from; give verify a loss_fn(output, target)")
    own = Batch(plain(batch), plain(targets))
    if isinstance(stages, Pipeline):
        with stages.watching("the other ranks to verify the model", PATIENT):
            return _Verifier(SplitModel(stages, own, loss), fp64, against).run()
    if targets is None and needs_target(loss):
        raise PipelineError("verify got targets=None, but loss_fn takes a target; give both, or loss_fn(output)")
    if num_microbatches is None:
        num_microbatches = 2 if num_examples(own.inputs) % 2 == 0 else 1
    with pipeline_of(stages, loss, num_microbatches) as pipeline:
        return _Verifier(SplitModel(pipeline, own, loss), fp64, against, compares_weights=True).run()


@final
@dataclass
class _Verifier:
    """The comparison, on each process. Only the first process has the unsplit model and what it computes."""

    split: SplitModel
    fp64: bool
    against: Against
    compares_weights: bool = False  # whether the model has weights of its own, instead of getting those of the stages
    model: nn.Module | None = None
    matching: Matching = field(init=False)

    def run(self) -> Verification:
        """Compare in each dtype, until one differs; find the reasons."""
        split = self.split
        notes: list[str] = []
        why: list[str] = []
        matched = on_first("matching the unsplit model and the stages", self._matched)
        self.matching = msgspec.convert(matched, Matching)
        comparisons, is_equal_by_parts = [], None
        dtypes: list[torch.dtype | None] = [torch.float64, None] if self.fp64 and not split.is_sharded else [None]
        if self.fp64 and split.is_sharded:
            notes.append("stages that fully_shard divides are compared in their own dtype only, not in float64")
        for dtype in dtypes:
            with split.apart(dtype):
                compared = self._compared(dtype)
            if isinstance(compared, str):
                notes.append(f"compared in the model's own dtype only: the unsplit model in float64 fails, {compared}")
                continue
            comparison, why, is_equal_by_parts, more_notes = compared
            comparisons.append(comparison)
            notes += more_notes
            if not broadcast_json(comparison.is_equal and not why):
                break
        if self.compares_weights:
            why += self._other_weights()
        own = Verification(
            tuple(comparisons), is_equal_by_parts, tuple(dict.fromkeys(why)), tuple(dict.fromkeys(notes))
        )
        return Verification.from_fields(broadcast_json(own.to_fields()))  # those of the first process

    # --- what is compared -----------------------------------------------------------------------------------------

    def _matched(self) -> Matching:
        """Make the model, on the first process; how it corresponds to the stages."""
        model = self.split.pipeline.stages.unsplit
        if not isinstance(model, nn.Module):
            if model is None:
                raise PipelineError(
                    "the unsplit model is unknown, as these stages were made by hand: set stages.unsplit to it, or to "
                    "a function that makes it, before the Pipeline is made"
                )
            _LOG.info("making the unsplit model")
            model = model()
        self.model = model
        return match(model, self.split.pipeline.stages)

    def _other_weights(self) -> list[str]:
        """A reason if the model and the stages have different weights."""
        assert self.model is not None
        own_weights = dict(self.model.named_parameters())
        for parameter in self.matching.parameters:
            for stage, name in parameter.places:
                own, other = own_weights[parameter.name], self.split.pipeline.stages[stage].get_parameter(name)
                if own.is_meta or other.is_meta:
                    continue
                if own.shape != other.shape or not equal_elements(own, other.to(own.device)).all():
                    return [
                        f"{parameter.name!r} has different values in stage {stage} and in the unsplit "
                        f"model (those of the stages were compared): load both from the same checkpoint, or make both "
                        f"with the same seed"
                    ]
        return []

    def _compared(self, dtype: torch.dtype | None) -> tuple[Comparison, list[str], bool | None, list[str]] | str:
        """In one dtype: the differences, the reasons, whether micro-batches agree, and the notes.

        Or why the unsplit model cannot run in float64.
        """
        split = self.split
        in_float64 = dtype is torch.float64
        name = "float64" if in_float64 else "the model's own dtype"
        unsplit = self._copied(dtype)
        batches = [batch.in_dtype(dtype).on(split.device) for batch in split.batches()]
        outcome: Outcome | None = None

        def run_unsplit() -> list[Any]:
            nonlocal outcome
            assert unsplit is not None
            _LOG.info("%s: the unsplit model", name)
            unsplit.refuse_empty()
            run_whole = self._runs_whole(batches)
            parts = whole(batches) if run_whole else by_microbatches(batches, split.num_microbatches)
            try:
                with ForComparison(False, in_float64):  # a forward may convert its weights, as NLLB-MoE's routers do
                    draws = any(unsplit.draws(part.inputs) for part in parts)
                with ForComparison(draws, in_float64):
                    still_draws = draws and any(unsplit.draws(part.inputs) for part in parts)
                    outcome = unsplit.run(parts)
            except Exception as error:
                if not in_float64:
                    raise
                return [False, False, error_line(error)]
            return [draws, still_draws, None]

        draws, still_draws, failure = on_first("the unsplit model's step", run_unsplit)
        if failure is not None:
            return str(failure)
        notes = ["dropout was switched off in both models"] if draws else []
        if unsplit is not None and outcome is not None:
            notes += _not_finite(unsplit, outcome)
            if self.against == "batch" and not self._runs_whole(batches):
                notes.append("micro-batches that are given as a list were compared one by one, not as one batch")
        with ForComparison(draws, in_float64):
            if split.is_first:
                _LOG.info("%s: the split model", name)
            comparison = self._compare_run(dtype, unsplit, outcome)
            if broadcast_json(comparison.is_equal):
                return comparison, [*reasons.untied(self.matching, split.is_sharded)], None, notes
            why, is_equal_by_parts = self._reasons(dtype, unsplit, batches, comparison)
            return comparison, ([_CANNOT_DRAW] if still_draws else []) + why, is_equal_by_parts, notes

    def _runs_whole(self, batches: list[Batch]) -> bool:
        """Whether the unsplit model runs on whole batches, instead of their micro-batches."""
        return self.against == "batch" and not any(isinstance(part, list) for batch in batches for part in batch)

    def _copied(self, dtype: torch.dtype | None) -> Unsplit | None:
        """The copy of the unsplit model, with the stages' values; None on all but the first process."""
        unsplit: Unsplit | None = None

        def copy_model() -> None:
            nonlocal unsplit
            assert self.model is not None
            unsplit = Unsplit(self.model, dtype, self.split.loss_fn, self.split.device)

        on_first("copying the unsplit model", copy_model)
        matched = [tensor for tensor in (*self.matching.parameters, *self.matching.buffers) if tensor.places]
        values = self.split.tensors([tensor.places[0] for tensor in matched], of_gradient=False)
        for tensor, value in zip(matched, values, strict=True):
            if unsplit is not None and value is not None:
                unsplit.fill(tensor.name, value)
        return unsplit

    def _compare_run(self, dtype: torch.dtype | None, unsplit: Unsplit | None, outcome: Outcome | None) -> Comparison:
        """Run the stages; the comparison on the first process, a placeholder on others, which only send gradients."""
        loss, outputs = self.split.step(dtype)
        gradients = self.split.tensors(places(self.matching), of_gradient=True)
        if unsplit is None or outcome is None:
            for _ in gradients:
                pass
            return Comparison("", 0.0, 0.0, 0.0, 0.0, None, ())
        floats = (p.dtype for p in unsplit.module.parameters() if p.is_floating_point())
        own = next(floats, torch.get_default_dtype())
        # Many models compute in float32 inside, whatever their dtype.
        rounding = max(torch.finfo(own).eps, torch.finfo(torch.float32).eps) ** 0.5
        return Comparison(
            str(dtype or own).removeprefix("torch."),
            EXACT if dtype is torch.float64 else rounding,
            outcome.loss,
            loss,
            relative(outcome.loss, loss),
            compare_outputs(outcome.outputs, outputs),
            compare_gradients(self.matching, unsplit, gradients),
        )

    # --- why they differ ------------------------------------------------------------------------------------------

    def _reasons(
        self, dtype: torch.dtype | None, unsplit: Unsplit | None, batches: list[Batch], comparison: Comparison
    ) -> tuple[list[str], bool]:
        """The reasons, and whether the split model equals the unsplit one by micro-batches."""
        split, matching, probes = self.split, self.matching, Probes()
        by_parts: Watched | None = None

        def run_by_microbatches() -> list[str]:
            nonlocal by_parts
            assert unsplit is not None
            _LOG.info("not equal: the unsplit model on one micro-batch after the other, to see why")
            on_whole = Watched.run(unsplit, whole(batches)) if self._runs_whole(batches) else None
            by_parts = Watched.run(unsplit, by_microbatches(batches, split.num_microbatches))
            return [] if on_whole is None else reasons.mixing(unsplit, on_whole, by_parts, comparison.tolerance)

        mixed = on_first("the unsplit model's micro-batches", run_by_microbatches)
        watched = [
            (name, module.get_submodule(own))
            for stage, module in split.pipeline.local_stages.items()
            for own, name in matching.modules[stage].items()
        ]
        with probes.on(watched):
            differences = self._compare_run(dtype, unsplit, by_parts and by_parts.outcome)
        if broadcast_json(differences.is_equal):
            return mixed, True
        of_stages = all_gather_json(probes.seen)
        if unsplit is None or by_parts is None:
            return [], False
        why = [
            *mixed,
            *reasons.untied(matching, split.is_sharded),
            *reasons.missing(matching, differences.parameters, unsplit),
            *reasons.other_values(matching, by_parts.probes, of_stages),
        ]
        return why or [_unknown(comparison)], False


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
