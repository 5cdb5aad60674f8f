"""Plans that fit, and which of them to recommend: of those that are as fast as can be told apart, the simplest.

`recommended` is the whole rule; `docs/autoplan.md` states it in the same words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from statistics import mean, median, quantiles, stdev
from typing import NamedTuple

from rota.calibration.spread import num_left_out
from rota.core.plan import Plan
from rota.core.simulation import simulate
from rota.core.text import count_text
from rota.core.timeline import Timeline
from rota.planning.layouts import Candidate

SEARCHED = "searched"  # instead of a schedule's name

#: What makes the first of two plans simpler, in the order of `Contender.simplicity`.
SIMPLER = (
    "uses fewer processes",
    "recomputes fewer stages",
    "has a named schedule",
    "runs each backward as a whole",
    "has fewer stages per rank",
    "has fewer copies of the model",
)

#: Of a step: a spread above which rounds of steps do not tell which plan is faster.
NOISY = 0.10

#: Of a step: measured steps may differ by this much and count as equal, however little the rounds differ.
LEAST_TOLERANCE = 0.01

#: Why a plan whose median step is the shortest is not recommended though no other is simpler.
SLOWER_BY_ROUNDS = "round by round, another plan was faster"

# Cores that other programs take away more than in the quietest start, from which on a start is left out.
_DISTURBED = 0.1
#: A plan whose steps are over this many times as long as the fastest is slower, however noisy the rounds were.
FAR = 1.25
# Student's t for a probability of 90%, by the number of rounds; from five on, order statistics reach it by themselves.
_STUDENT_T = {2: 6.314, 3: 2.920, 4: 2.353}


@dataclass(frozen=True)
class Contender:
    """A plan that fits, its schedule's name or `SEARCHED`, and a lower bound on every order of its ops.

    Attributes:
        layers_us: Its step by the layers' times, where its stages or ops were measured as well; else None.
        steps: Its steps, if some were run.
    """

    candidate: Candidate
    schedule: str
    plan: Plan
    bound_us: int
    layers_us: int | None = None
    steps: StepTimes | None = None

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated timeline of the plan."""
        return simulate(self.plan)

    @property
    def makespan_us(self) -> int:
        """The simulated makespan of the plan, in µs."""
        return self.timeline.makespan_us

    @property
    def step_us(self) -> int:
        """The time of a step: as measured, else as simulated."""
        return self.makespan_us if self.steps is None else self.steps.median_us

    @property
    def by_layers_us(self) -> int:
        """The simulated step by the layers' times, which all plans have: stages are measured of some only."""
        return self.makespan_us if self.layers_us is None else self.layers_us

    @property
    def peak_bytes(self) -> int:
        """The most bytes that any rank holds at once."""
        return max(self.timeline.peak_memory_bytes)

    def is_as(self, other: Contender) -> bool:
        """Whether both are one plan, whatever their ops' times are."""
        return self._identity == other._identity

    @property
    def _identity(self) -> tuple[object, ...]:
        candidate = self.candidate
        return candidate.layout, candidate.boundaries, candidate.recomputed, self.plan.orders

    @property
    def simplicity(self) -> tuple[int, ...]:
        """The smaller, the simpler; first what costs a user most, as in `SIMPLER`.

        Only between plans that are alike in all else, fewer copies of the model are simpler: replicas of a plain plan
        are easier to understand and to run than one pipeline that interleaves stages.
        """
        layout = self.candidate.layout
        directions = 2 if layout.has_copies else 1  # each rank has a stage of each direction's copy
        return (
            self.num_processes,
            len(self.candidate.recomputed),
            int(self.schedule == SEARCHED),
            int(self.candidate.splits_backward),
            directions * layout.stages_per_rank,
            directions * layout.num_replicas,
        )

    @property
    def num_processes(self) -> int:
        """Processes of a step, one per rank of each replica."""
        return self.candidate.layout.num_ranks * self.candidate.layout.num_replicas

    @property
    def key(self) -> tuple[int, int, int]:
        """The smaller, the better: time, then memory, then processes."""
        return self.step_us, self.peak_bytes, self.num_processes


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


# --- measured steps ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Steps of one plan that were run on this machine: each one's time in µs, and the ops of some of them.

    `missing_cores` is how many cores other programs took away from them, on average. `num_starts` is how often the
    processes were started for them. `rounds_us` has the median step of each start, and None instead of those that other
    programs disturbed: two plans are compared by the rounds that both have.
    """

    steps_us: tuple[int, ...]
    timelines: tuple[Timeline, ...] = ()
    missing_cores: float = 0.0
    num_starts: int = 1
    rounds_us: tuple[int | None, ...] = ()

    @property
    def median_us(self) -> int:
        """The time of a step."""
        return round(median(self.steps_us))

    @property
    def spread(self) -> float:
        """The interquartile range of the steps, as a part of their median."""
        if len(self.steps_us) < 2:
            return 0.0
        first, middle, third = quantiles(self.steps_us, n=4, method="inclusive")
        return (third - first) / middle if middle else 0.0


def of_starts(starts: Sequence[StepTimes]) -> StepTimes:
    """The steps of one plan's starts, without starts that other programs disturbed more than the quietest."""
    most = min(start.missing_cores for start in starts) + _DISTURBED
    counted = [start for start in starts if start.missing_cores < most]
    return StepTimes(
        tuple(us for start in counted for us in start.steps_us),
        tuple(timeline for start in counted for timeline in start.timelines),
        mean(start.missing_cores for start in counted),
        len(starts),
        tuple(start.median_us if start in counted else None for start in starts),
    )


class Difference(NamedTuple):
    """How many `times` as long the steps of one plan are as another's, and the `spread` of that.

    The spread is how far from `times` the ratio may really be, as far as `num_rounds` rounds of both tell.
    """

    times: float
    spread: float
    num_rounds: int


def difference(steps: StepTimes, base: StepTimes) -> Difference:
    """Compare the steps of two plans round by round, so that what slows the machine for a while cancels.

    The median of the n rounds' ratios counts. Its spread covers the true ratio with a probability of 90%:

    - From five rounds on it is that of the order statistics between which the true median is, whatever the
      distribution: all n ratios are on one side of it with a probability of 2 / 2^n, 6% for n = 5.
    - The range of two to four ratios covers it in 50, 75 and 87% only. Therefore the ratios are taken as normally
      distributed, and it is Student's interval around their mean, t s / sqrt(n), if that is wider: for two ratios 6.3
      times half of their distance. The distance of median and mean is added.
    - Two rounds may also agree by chance, so the interquartile range of either plan's steps counts as well.
    - One round says nothing about how far rounds are apart: its spread is at least that of `FAR`.
    """
    ratios = sorted(ratios_of_rounds(steps, base))
    if len(ratios) < 2:
        return Difference(ratios[0], max(FAR - 1, steps.spread, base.spread), len(_common_rounds(steps, base)))
    times, outer = median(ratios), num_left_out(len(ratios))
    spread = max(times - ratios[outer], ratios[-1 - outer] - times)
    if len(ratios) in _STUDENT_T:
        around_mean = _STUDENT_T[len(ratios)] * stdev(ratios) / sqrt(len(ratios))
        spread = max(spread, around_mean + abs(mean(ratios) - times))
    if len(ratios) == 2:
        spread = max(spread, steps.spread, base.spread)
    return Difference(times, spread, len(ratios))


def ratios_of_rounds(steps: StepTimes, base: StepTimes) -> list[float]:
    """How many times as long one plan's steps are as another's in each round that both have.

    If they have none in common, the medians of all steps count as one round.
    """
    return [us / other_us for us, other_us in _common_rounds(steps, base)] or [steps.median_us / max(base.median_us, 1)]


def _common_rounds(steps: StepTimes, base: StepTimes) -> list[tuple[int, int]]:
    pairs = zip(steps.rounds_us, base.rounds_us, strict=False)  # a plan that is far off has fewer
    return [(us, other_us) for us, other_us in pairs if us and other_us]
