"""Plans, timelines and costs from files; errors name the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rota import reading, schedule_csv
from rota.cli.requirements import InputError
from rota.costs import Cluster, Costs, assumed_costs
from rota.errors import FormatError, PlanError, RotaError
from rota.placement import Placement
from rota.placing import place
from rota.plan import Plan
from rota.profiles import Profile
from rota.simulation import timeline_of
from rota.tasks import Kind
from rota.timeline import Timeline


def read_costs(path: str) -> Costs:
    """The costs in a JSON file."""
    text = _text(path)
    with named(path):
        return Costs.from_json(text)


def read_profile(path: str) -> Profile:
    """The profile in a JSON file, such as `rota profile` writes."""
    text = _text(path)
    with named(path):
        return Profile.from_json(text)


def read_cluster(path: str) -> Cluster:
    """The cluster in a JSON file."""
    text = _text(path)
    with named(path):
        return Cluster.from_json(text)


def read_plan(path: str) -> Plan:
    """A plan.json, the plan inside a timeline.json, or a schedule CSV (then with the default costs)."""
    loaded = read_plan_or_timeline(path)
    return loaded.plan if isinstance(loaded, Timeline) else loaded


def read_timeline(path: str) -> Timeline:
    """A timeline.json; a plan is simulated."""
    loaded = read_plan_or_timeline(path)
    with named(path):
        return timeline_of(loaded)


def read_plan_or_timeline(path: str) -> Plan | Timeline:
    """The plan in a plan.json or schedule CSV, or the timeline in a timeline.json."""
    text = _text(path)
    with named(path):
        if path.lower().endswith(".csv"):
            return Plan.from_csv(text, _placement_of_csv(text))
        document = reading.parse(text, "plan", "timeline")
        return Timeline.from_fields(document) if document.path == "timeline" else Plan.from_fields(document)


def _text(path: str) -> str:
    """The text of a file that Rota wrote. Raises InputError for a Python file: a JSON error would help less."""
    text = reading.read_text(path)
    if path.lower().endswith(".py"):
        raise InputError(
            f"{path} is a Python file, but this needs a file that Rota wrote; run a script by "
            f"`rota run plan.json {path}`, plan a model by `rota autoplan {path}`"
        )
    return text


@contextmanager
def named(path: str) -> Iterator[None]:
    """Errors raised inside name the file."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{path}: {error}", error.reason) from None
    except RotaError as error:
        raise InputError(f"{path}: {error}") from None


def _placement_of_csv(text: str) -> Placement:
    """A chain of stages where the CSV puts them: F 1 ms, B 2 ms or I and W 1 ms each, no limit."""
    orders = schedule_csv.read(text)
    if not orders:
        raise FormatError("the CSV is empty; it needs one line per rank, such as 0F0,0F1,0B0,0B1")
    ranks = schedule_csv.stage_ranks(orders)
    kinds = {op.kind for order in orders for op in order}
    costs = assumed_costs(len(ranks))
    costs = costs.with_split_backward() if Kind.W in kinds else costs
    placement = place(costs, Cluster.uniform(len(orders)), ranks)
    return placement if kinds - {Kind.F} else placement.forward_only()
