"""The answer of `verify`: exact, or which parameter of which stage differs, and the likely reason."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from rota.core.text import angle_repr, count_text

EXACT = 1e-10  # in float64, relative
_MOST_ROWS = 8


@dataclass(frozen=True, slots=True)
class ParameterDifference:
    """How much a gradient of the split model differs from the unsplit model's.

    Attributes:
        name: The parameter's name in the unsplit model; if the model does not have it, its name in the stage.
        stage: The stage that has it; None if no stage does.
        relative: The largest difference, relative to the largest element of the parameter's gradient (or to a
            thousandth of the largest of all gradients, if that is more). inf: one of the two has no gradient. nan:
            an element is NaN or infinite in only one of the two; where both have the same, it counts as equal.
    """

    name: str
    stage: int | None
    relative: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The split model against the unsplit one, in one dtype.

    Attributes:
        dtype: "float64", or the model's own.
        tolerance: The relative difference up to which the two count as equal.
        loss: The unsplit model's loss.
        split_loss: The split model's loss.
        loss_difference: The relative difference of the two losses.
        output_difference: The largest difference of outputs, relative to the largest output; None if they cannot be
            compared.
        parameters: The differences of all parameters' gradients, in the order of the unsplit model.
    """

    dtype: str
    tolerance: float
    loss: float
    split_loss: float
    loss_difference: float
    output_difference: float | None
    parameters: tuple[ParameterDifference, ...]

    @property
    def largest(self) -> float:
        """The largest relative difference of all gradients."""
        return largest_of(parameter.relative for parameter in self.parameters)

    @property
    def is_equal(self) -> bool:
        """Whether loss, outputs and all gradients agree within the tolerance."""
        differences = (self.loss_difference, self.output_difference or 0.0, self.largest)
        return all(difference <= self.tolerance for difference in differences)  # false for nan

    @property
    def worst(self) -> tuple[ParameterDifference, ...]:
        """The parameters that differ by more than the tolerance, worst first."""
        differing = (parameter for parameter in self.parameters if not parameter.relative <= self.tolerance)
        return tuple(sorted(differing, key=lambda parameter: -nan_is_largest(parameter.relative)))


@dataclass(frozen=True, slots=True)
class Verification:
    """What `rota.verify` found.

    Attributes:
        comparisons: One in float64, if requested, and one in the model's own dtype.
        by_microbatches: Whether the split model equals the unsplit model run on one micro-batch after the other. None:
            not checked, as it equals the unsplit model on the whole batch.
        reasons: Why the split model is not exact, the most likely first; empty if it is.
        notes: What else was done, such as switching off dropout.
    """

    comparisons: tuple[Comparison, ...]
    by_microbatches: bool | None = None
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line."""
        reasons = "" if self.exact else f", {count_text(len(self.reasons), 'reason')} found"
        return f"Verification: {'exact' if self.exact else 'NOT exact'}{reasons}"

    __repr__ = angle_repr

    @property
    def exact(self) -> bool:
        """Whether the split model computes what the unsplit one does, on the whole batch."""
        return not self.reasons and all(comparison.is_equal for comparison in self.comparisons)

    def to_text(self) -> str:
        """The verdict, the differences by dtype, the worst parameters, the reasons and the notes."""
        lines = ["exact" if self.exact else "NOT exact"]
        for comparison in self.comparisons:
            lines += _lines(comparison)
        if self.by_microbatches:
            lines.append(
                "  The split model equals the unsplit model run on one micro-batch after the other: the stages are "
                "correct, but the model's result depends on the batch as a whole."
            )
        lines += [f"  reason: {reason}" for reason in self.reasons]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def to_fields(self) -> dict[str, Any]:
        """The fields in JSON, which has no number for NaN and inf: they are the texts "nan", "inf" and "-inf"."""
        return asdict(self, dict_factory=_in_json)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Verification:
        """The report that `to_fields` wrote."""
        return msgspec.convert(fields, cls, strict=False)  # which makes numbers of texts


def largest_of(differences: Iterable[float]) -> float:
    """The largest difference, 0.0 if there is none."""
    return max(differences, key=nan_is_largest, default=0.0)


def nan_is_largest(difference: float) -> float:
    """A key for `max`, which may pass over a NaN."""
    return math.inf if math.isnan(difference) else difference


def _in_json(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value for name, value in fields
    }


def _lines(comparison: Comparison) -> list[str]:
    outputs = "not compared" if comparison.output_difference is None else f"{comparison.output_difference:.1e}"
    number = count_text(len(comparison.parameters), "gradient")
    head = (
        f"  {comparison.dtype}: loss {comparison.split_loss:.9g}, unsplit {comparison.loss:.9g} "
        f"({comparison.loss_difference:.1e}); outputs {outputs}; {number} {comparison.largest:.1e} "
        f"(exact up to {comparison.tolerance:.0e})"
    )
    worst = comparison.worst
    rows = [f"    {_where(parameter)}: {_how_far(parameter)}" for parameter in worst[:_MOST_ROWS]]
    more = [f"    and {len(worst) - _MOST_ROWS} more"] if len(worst) > _MOST_ROWS else []
    return [head, *rows, *more]


def _where(parameter: ParameterDifference) -> str:
    return parameter.name if parameter.stage is None else f"stage {parameter.stage}, {parameter.name}"


def _how_far(parameter: ParameterDifference) -> str:
    if math.isnan(parameter.relative):
        return "an element is NaN or infinite in only one of the two"
    return "only one of the two has a gradient" if math.isinf(parameter.relative) else f"{parameter.relative:.1e}"
