"""Which of several plans to recommend: of those that are as fast as can be told apart, the simplest.

`recommended` is the whole rule, over plain figures. `docs/autoplan.md` states it in the same words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rota.core.units import count_text
from rota.planning.evaluation import SEARCHED, Found
from rota.planning.step_times import FAR, StepTimes, difference, ratios_of_rounds

#: Of a step: a spread above which rounds of steps do not tell which plan is faster.
NOISY = 0.10

#: Of a step: measured steps may differ by this much and count as equal, however little the rounds differ.
LEAST_TOLERANCE = 0.01

#: Why a plan whose median step is the shortest is not recommended though no other is simpler.
SLOWER_BY_ROUNDS = "round by round, another plan was faster"

#: What makes the first of two plans simpler, in the order of `simplicity`.
_SIMPLER = (
    "uses fewer processes",
    "recomputes fewer stages",
    "has a named schedule",
    "runs each backward as a whole",
    "has fewer stages per rank",
    "has fewer copies of the model",
)


class Contender(NamedTuple):
    """What decides whether a plan is recommended.

    Attributes:
        step_us: The time of a step: as measured, else as predicted.
        peak_bytes: The memory of the fullest rank.
        simplicity: The smaller, the simpler.
        steps: The steps that were run; None: the time is predicted.
    """

    step_us: int
    peak_bytes: int
    simplicity: tuple[int, ...]
    steps: StepTimes | None = None


def recommended(contenders: Sequence[Contender], tolerance: float) -> int:
    """The index of the plan to recommend.

    1. A plan is out if another one beats it: if in every round in which both ran, its step took more than `tolerance`
       longer. (Where rounds are missing, plans may beat one another in a circle; if all are out, all stay.)
    2. The fastest of those left counts, and those that are as fast by `is_as_fast`.
    3. Of these, the simplest is recommended; of equally simple ones the one that needs the least memory, then the
       faster one.

    Args:
        contenders: At least one.
        tolerance: The part of a step by which steps may differ and count as equal, however sure the difference is.
    """
    every = range(len(contenders))
    left = [a for a in every if not any(is_beaten(contenders[a], contenders[b], tolerance) for b in every)] or [*every]
    fastest = contenders[min(left, key=lambda i: _by_time(contenders[i]))]
    alike = [i for i in left if is_as_fast(contenders[i], fastest, tolerance)]
    return min(alike, key=lambda i: (contenders[i].simplicity, contenders[i].peak_bytes, contenders[i].step_us))


def _by_time(contender: Contender) -> tuple[int, int, tuple[int, ...]]:
    return contender.step_us, contender.peak_bytes, contender.simplicity


def is_beaten(contender: Contender, other: Contender, tolerance: float) -> bool:
    """Whether a plan's step took more than `tolerance` longer in every round in which both plans ran."""
    if contender.steps is None or other.steps is None:
        return False
    return min(ratios_of_rounds(contender.steps, other.steps)) > 1 + tolerance


def is_as_fast(contender: Contender, fastest: Contender, tolerance: float) -> bool:
    """Whether a plan counts as equally fast: its step takes at most `spread_between` longer, and not over `FAR` times.

    The median of the rounds' ratios counts; for `FAR` also the medians of all steps, which are shown.
    """
    if contender.steps is None or fastest.steps is None:
        return contender.step_us <= fastest.step_us * (1 + tolerance)
    if contender.step_us > FAR * fastest.step_us:
        return False
    slower = difference(contender.steps, fastest.steps).times - 1
    return slower <= min(spread_between(contender.steps, fastest.steps, tolerance), FAR - 1)


def spread_between(steps: StepTimes | None, fastest: StepTimes | None, tolerance: float) -> float:
    """The part of a step by which two plans may differ and count as equal: at least `tolerance`."""
    if steps is None or fastest is None:
        return tolerance
    return max(difference(steps, fastest).spread, tolerance)


def chosen(plans: Iterable[Found], tolerance: float) -> Found | None:
    """The plan to recommend by `recommended`; None if there are none."""
    every = list(plans)
    return every[recommended([_contender(found) for found in every], tolerance)] if every else None


def _contender(found: Found) -> Contender:
    return Contender(found.step_us, found.peak_bytes, simplicity(found), found.steps)


def simplicity(found: Found) -> tuple[int, ...]:
    """The smaller, the simpler; first what costs a user most.

    Processes; then what each of them does: stages that recompute, a searched order, a backward in two, stages per
    rank. Only between plans that are alike in all of this, fewer copies of the model are simpler: replicas of a plain
    plan are easier to understand and to run than one pipeline that interleaves stages.
    """
    layout = found.candidate.layout
    directions = 2 if layout.has_copies else 1  # each rank has a stage of each direction's copy
    return (
        layout.num_ranks * layout.num_replicas,
        len(found.candidate.recomputed),
        int(found.schedule == SEARCHED),
        int(found.candidate.splits_backward),
        directions * layout.stages_per_rank,
        directions * layout.num_replicas,
    )


def advantage(best: Found, other: Found) -> str:
    """What the recommended plan has over one that counts as equally fast, as a verb; "" if nothing."""
    for text, mine, theirs in zip(_SIMPLER, simplicity(best), simplicity(other), strict=True):
        if mine != theirs:
            return text if mine < theirs else ""
    return "needs less memory" if best.peak_bytes < other.peak_bytes else ""


def why_preferred(best: Found, faster: Found, tolerance: float) -> str:
    """Why a plan is recommended though another one's step is shorter: what follows "but"."""
    if not (what := advantage(best, faster)):
        return SLOWER_BY_ROUNDS
    if best.steps is None or faster.steps is None:
        return f"differences are known only to within {tolerance:.1%}, and this plan {what}"
    ratios = ratios_of_rounds(best.steps, faster.steps)
    as_fast = sum(ratio <= 1 + tolerance for ratio in ratios)
    return f"this plan was as fast in {as_fast} of {count_text(len(ratios), 'round')}, and {what}"
