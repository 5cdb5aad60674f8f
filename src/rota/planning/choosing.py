"""Which of several plans to recommend: of those that are as fast as can be told apart, the simplest.

`recommended` is the whole rule; `docs/autoplan.md` states it in the same words.
"""

from __future__ import annotations

from collections.abc import Sequence

from rota.core.text import count_text
from rota.planning.evaluation import SIMPLER, Contender
from rota.planning.step_times import FAR, StepTimes, difference, ratios_of_rounds

#: Of a step: a spread above which rounds of steps do not tell which plan is faster.
NOISY = 0.10

#: Of a step: measured steps may differ by this much and count as equal, however little the rounds differ.
LEAST_TOLERANCE = 0.01

#: Why a plan whose median step is the shortest is not recommended though no other is simpler.
SLOWER_BY_ROUNDS = "round by round, another plan was faster"


def recommended(contenders: Sequence[Contender], tolerance: float) -> Contender:
    """The plan to recommend.

    1. A plan is out if another one beats it: if in every round in which both ran, its step took more than `tolerance`
       longer. (Where rounds are missing, plans may beat one another in a circle; if all are out, all stay.)
    2. The fastest of those left counts, and those that are as fast by `is_as_fast`.
    3. Of these, the simplest is recommended; of equally simple ones the one that needs the least memory, then the
       faster one.

    `tolerance` is the part of a step by which steps may differ and count as equal, however sure the difference is.
    """
    unbeaten = [plan for plan in contenders if not any(is_beaten(plan, other, tolerance) for other in contenders)]
    left = unbeaten or contenders
    fastest = min(left, key=lambda plan: (plan.step_us, plan.peak_bytes, plan.simplicity))
    alike = [plan for plan in left if is_as_fast(plan, fastest, tolerance)]
    return min(alike, key=lambda plan: (plan.simplicity, plan.peak_bytes, plan.step_us))


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


def advantage(best: Contender, other: Contender) -> str:
    """What the recommended plan has over one that counts as equally fast, as a verb; "" if nothing."""
    for text, value, other_value in zip(SIMPLER, best.simplicity, other.simplicity, strict=True):
        if value != other_value:
            return text if value < other_value else ""
    return "needs less memory" if best.peak_bytes < other.peak_bytes else ""


def why_preferred(best: Contender, faster: Contender, tolerance: float) -> str:
    """Why a plan is recommended though another one's step is shorter: what follows "but"."""
    if not (merit := advantage(best, faster)):
        return SLOWER_BY_ROUNDS
    if best.steps is None or faster.steps is None:
        return f"differences are known only to within {tolerance:.1%}, and this plan {merit}"
    ratios = ratios_of_rounds(best.steps, faster.steps)
    as_fast = sum(ratio <= 1 + tolerance for ratio in ratios)
    return f"this plan was as fast in {as_fast} of {count_text(len(ratios), 'round')}, and {merit}"
