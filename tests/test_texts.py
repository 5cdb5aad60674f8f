"""`print(noun)` and a noun in the interactive interpreter are one line; `to_text` has the rest."""

import inspect
from fractions import Fraction
from typing import Any

import pytest

import rota
from planning.test_autoplan import UNEVEN, layer_costs
from rota import PlannedBatch, Profile, Verification, check_device_order
from rota.cli.common import parse_memory
from rota.core.text import count_text, exact_size_text

MANY = 16
COSTS = rota.Costs.uniform(MANY, 100, 200, activation_bytes=7)
CLUSTER = rota.Cluster.uniform(MANY, 80_000_000_000)
PLACEMENT = rota.place(COSTS, CLUSTER)
PLAN = rota.schedules.one_f_one_b(PLACEMENT, MANY)
TIMELINE = rota.simulate(PLAN)
IDLES = rota.idle(TIMELINE)
CURVES = (rota.Curve(1, 2, 3),) * MANY
GROUPS = ((0, 1),) * MANY
LAYERS = layer_costs(1, UNEVEN * 8)

#: One of each kind of noun, with many fields.
NOUNS: dict[str, Any] = {
    "AllReduceTimes": rota.AllReduceTimes(2, tuple((1024 * (1 + i), 5) for i in range(MANY))),
    "BatchBound": rota.BatchBound(100, "all orders", "rank 0 is busy"),
    "BatchPlan": rota.BatchPlan(PLAN, GROUPS, (), 5, (rota.BatchBound(4, "all orders", "rank 0 is busy"),)),
    "Calibration": rota.Calibration(5, (5,) * MANY, PLAN, ()),
    "Cause": rota.Cause.ORDER,
    "Cluster": CLUSTER,
    "Comparison": rota.compare(PLAN, TIMELINE),
    "Costs": COSTS,
    "Curve": CURVES[0],
    "DeviceOrder": check_device_order(PLAN),
    "Edge": PLACEMENT.edges[0],
    "Explanation": rota.Explanation(TIMELINE, IDLES, TIMELINE.makespan_us, (5,) * MANY, ()),
    "Idle": IDLES[0],
    "Kind": rota.Kind.F,
    "LayerCosts": LAYERS,
    "Link": CLUSTER.link,
    "Machine": rota.Machine(MANY, 80_000_000_000),
    "Op": PLAN.orders[0][0],
    "Placement": PLACEMENT,
    "Plan": PLAN,
    "PlannedBatch": PlannedBatch([0] * MANY, None, PLAN, GROUPS, GROUPS, 5, 4, 3, 2),
    "Profile": Profile((LAYERS,)),
    "SearchResult": rota.SearchResult(PLAN, "makespan", Fraction(9), Fraction(9), "a proof", "a rule", None, (), 1.0),
    "SharedLink": rota.SharedLink("uplink", 100, (0,), (1,)),
    "Size": rota.Size(1, 1),
    "SizeModel": rota.SizeModel(CURVES, CURVES),
    "Span": next(TIMELINE.spans()),
    "StepEnd": rota.StepEnd(0, 1, 2),
    "Task": PLACEMENT.tasks[0],
    "Timeline": TIMELINE,
    "Transfer": PLAN.transfers[0],
    "Verification": Verification((), True, ("it is wrong",) * MANY, ()),
}
#: These have Python's own text: a class, not values.
SERVICES = {"Checkpoints", "CutPoint", "Pipeline", "Planner", "Stages", "StepHandle"}
#: These are arguments: what may be chosen.
OPTIONS = {"Choices", "ProfileOptions", "StageProfileOptions"}


def test_every_public_noun_is_here() -> None:
    public = {name for name in rota.__all__ if inspect.isclass(getattr(rota, name))}
    nouns = {name for name in public if not issubclass(getattr(rota, name), BaseException)}
    assert {*NOUNS} == nouns - SERVICES - OPTIONS
    assert all(type(noun).__name__ == name for name, noun in NOUNS.items())


@pytest.mark.parametrize("noun", NOUNS.values(), ids=lambda noun: type(noun).__name__)
def test_a_noun_is_one_line(noun: Any) -> None:
    for text in (str(noun), repr(noun)):
        assert "\n" not in text
        assert 0 < len(text) <= 160


@pytest.mark.parametrize("num_bytes", [1, 999, 1000, 1500, 4_003_000, 70 * 10**9, 3 * 10**12, 10**15])
def test_an_exact_size_is_read_back(num_bytes: int) -> None:
    assert parse_memory(exact_size_text(num_bytes)) == num_bytes
    assert exact_size_text(70 * 10**9) == "70GB"


@pytest.mark.parametrize(("number", "text"), [(0, "0 plans"), (1, "1 plan"), (2000, "2,000 plans")])
def test_counts_are_as_people_write_them(number: int, text: str) -> None:
    assert count_text(number, "plan") == text
