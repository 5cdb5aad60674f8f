"""Advice follows what the measured ops can tell, not their noise."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from rota import Cluster, Costs, Kind, Op, Plan, Timeline, bidirectional, calibrate, explain, place, schedules
from rota.calibration.spread import Spread, copies, have_same_layers
from rota.core.plan import Usage
from support.measured import timed


def chain(num_microbatches: int = 8) -> Plan:
    plan = schedules.one_f_one_b(place(Costs.uniform(4, 100, 200), Cluster.uniform(4)), num_microbatches)
    return replace(plan, usage=Usage(("a", "b", "c"), 1, 1, (4, 4, 4, 4)))


def both_ways(num_stages: int = 2, num_microbatches: int = 8) -> Plan:
    plan = schedules.chimera(
        bidirectional(Costs.uniform(num_stages, 100, 200), Cluster.uniform(num_stages)), num_microbatches
    )
    return replace(plan, usage=Usage(tuple("abc"[: num_stages - 1]), 1, 1, (4,) * num_stages))


def noisy(plan: Plan, spread: float, seed: int, slow: Sequence[int] = (), times: float = 1.6) -> Timeline:
    """A run whose ops take from 1 to 1 + `spread` times as long as planned, and those of slow stages `times` that."""
    chooser = random.Random(seed)

    def us(op: Op) -> int:
        longer = (1 + spread * chooser.random()) * (times if op.stage in slow else 1)
        return round((100 if op.kind is Kind.F else 200) * longer)

    return timed(plan, us)


def cuts(timeline: Timeline) -> list[str]:
    return [one.words for one in explain(timeline).suggestions if one.what == "cut"]


def test_equal_stages_with_differing_ops_are_never_cut_again() -> None:
    for seed in range(12):
        timeline = noisy(chain(), 3.0, seed)
        assert cuts(timeline) == []
        assert "how to cut" not in calibrate([timeline], "1f1b").verdict()


def test_a_slow_stage_is_told_if_its_ops_do_not_differ_much() -> None:
    for seed in range(6):
        timeline = noisy(chain(), 0.1, seed, slow=[2])
        assert all(words.startswith("stage 2 (all from b to before c) takes ") for words in cuts(timeline))
        assert cuts(timeline)
        assert explain(timeline).doubts == ()
        assert "which no order can fix: `rota explain` says how to cut" in calibrate([timeline], "1f1b").verdict()


def test_it_is_said_that_the_ops_differ_too_much() -> None:
    """Half of the ops of stage 2 take six times as long as the others, so that its median is above the mean."""
    plan = chain()
    timeline = timed(plan, lambda op: 600 if op.stage == 2 and op.microbatch % 2 else 100)
    explanation = explain(timeline)
    assert cuts(timeline) == []
    assert explanation.doubts == (
        "stage 2 (all from b to before c) takes 115% longer than the mean: move 175 µs (25%) of its work, 1 of its 4 "
        "layers, to stage 1: 20.5% shorter with the median times, but not with all times that the measured ops allow",
    )
    assert f"Too uncertain to advise: {explanation.doubts[0]}." in explanation.to_text()
    assert "more work" not in calibrate([timeline], "1f1b").verdict()


def test_the_table_and_the_sentences_give_a_rank_one_figure() -> None:
    """One op of rank 3 is stalled: by all of its ops it has the most work, by their medians rank 2 has."""
    stalled = Op.parse("3F5")
    timeline = timed(chain(), lambda op: 5000 if op == stalled else 131 if op.stage == 2 else 100)
    assert max(timeline.busy_us) == timeline.busy_us[3]
    found = explain(timeline)
    share = found.work_us[2] / (sum(found.work_us) / 4)
    rows = found.to_text().partition("  rank   work   idle")[2].split("\n")[1:5]
    assert [row.split()[1] for row in rows] == [f"{4 * us / sum(found.work_us):.0%}" for us in found.work_us]
    assert max(found.work_us) == found.work_us[2]
    assert any(f"takes {share - 1:.0%} longer than the mean" in words for words in cuts(timeline))


def test_where_ranks_share_cores_ops_do_not_tell_which_rank_has_more_work() -> None:
    timeline = replace(timed(chain(), lambda op: 300 if op.stage == 2 else 100), num_cores=2)
    assert cuts(replace(timeline, num_cores=4))
    found = explain(timeline)
    assert cuts(timeline) == []
    assert (found.doubts, found.imbalance) == ((), "")
    text = found.to_text()
    assert "4 ranks shared 2 cores" in text
    assert "Use no more ranks than cores before you judge the ranks' work and idle times below." in text


def test_several_runs_tell_more_than_one() -> None:
    timelines = [noisy(chain(), 1.0, seed, slow=[2], times=1.8) for seed in range(8)]
    widths = []
    for some in (timelines[:1], timelines):
        spread = Spread.of(some, chain().placement)
        pairs = zip(spread.shortest.tasks, spread.longest.tasks, strict=True)
        widths.append(sum(b.duration_us - a.duration_us for a, b in pairs))
    assert widths[1] < widths[0] / 2
    assert "how to cut" in calibrate(timelines, "1f1b").verdict()


@pytest.mark.parametrize("differ", [0, 2])
def test_another_order_is_told_if_it_is_faster_whatever_the_times(differ: int) -> None:
    """GPipe's order is faster than one that does all of a micro-batch before the next, but hardly than 1F1B."""
    placement = place(Costs.uniform(3, 100, 200), Cluster.uniform(3))
    alone = [" ".join(f"{stage}F{m} {stage}B{m}" for m in range(8)) for stage in range(3)]
    plan = Plan(placement, 8, tuple(tuple(map(Op.parse, order.split())) for order in alone))
    found = explain(noisy(plan, differ, 0))
    (order,) = [one for one in found.suggestions if one.what == "order"]
    assert order.gain_us > 0.2 * found.model_us
    text = found.to_text()
    share = f"{order.gain_us / found.model_us:.1%}"
    assert ("does not mean" in text) is ("order" in {str(cause) for cause in found.by_cause})
    if "does not mean" in text:
        assert f"the best of the named schedules that fit shortens the step by {share} (see below)." in text


def test_an_order_that_is_faster_with_some_times_only_is_not_told() -> None:
    """The first stage takes 100 µs or 1,000: what eager_1f1b gains over 1F1B depends on which."""
    plan, told = chain(), set()
    for seed in range(8):
        timeline = noisy(plan, 8.0, seed)
        found, explanation = calibrate([timeline]), explain(timeline)
        faster = [one.name for one in found.candidates if one.makespan_us < 0.99 * found.predicted_us]
        assert bool(faster) is ("the measured ops differ too much to tell" in found.verdict() or found.is_faster)
        assert (found.chosen is found.plan) is not found.is_faster
        told.add((bool(faster), found.is_faster, any("the order of" in doubt for doubt in explanation.doubts)))
    assert (True, False, True) in told


def test_ranks_with_the_same_layers_are_never_told_to_cut_again() -> None:
    plan = both_ways()
    assert (copies(plan.placement), have_same_layers(plan.placement)) == (2, True)
    measured = timed(plan, lambda op: 300 if op.stage == 3 else 100)  # a copy of stage 1
    assert cuts(measured) == []
    assert explain(measured).doubts == ()
    found = calibrate([measured])
    assert found.unevenness[1] == 1.0
    assert "how to cut" not in found.verdict()


def test_work_is_moved_in_all_copies_of_a_stage() -> None:
    plan = both_ways(4)
    assert (copies(plan.placement), have_same_layers(plan.placement)) == (4, False)
    measured = timed(plan, lambda op: 300 if op.stage in (1, 5) else 100)
    assert all(words.startswith("stages 1 and 5 (all from a to before b) take 100% longer") for words in cuts(measured))
    assert any("to stages 0 and 4" in words or "to stages 2 and 6" in words for words in cuts(measured))
