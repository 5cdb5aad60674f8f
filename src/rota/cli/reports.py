"""What commands report: the fields of `--json`, with units in the names, and pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rota.cli.requirements import require
from rota.cli.screen import transfers_text
from rota.core.simulation import simulate
from rota.core.timeline import Timeline

if TYPE_CHECKING:
    from rota import BatchPlan
    from rota.accounting.comparison import Comparison
    from rota.calibration import Calibration
    from rota.core.layers import LayerCosts
    from rota.core.sizes import SizeModel
    from rota.interop.traces import ImportedTrace
    from rota.planning import Answer
    from rota.planning.choosing import Contender
    from rota.runtime.checkpoints.saved import Saved
    from rota.search import Frontier, SearchResult


def print_json(fields: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    print(json.dumps(fields, indent=2, ensure_ascii=False))


def _figures(source: object, *names: str) -> dict[str, Any]:
    """Attributes by name, as JSON has them: fractions as numbers."""
    values = ((name, getattr(source, name)) for name in names)
    return {name: float(value) if isinstance(value, Fraction) else value for name, value in values}


def of_timeline(timeline: Timeline) -> dict[str, Any]:
    """Size, time, idle time and memory of a plan or run, and what the plan counts of its transfers."""
    placement = timeline.plan.placement
    return {
        **_figures(timeline.plan, "num_ranks", "num_stages", "num_microbatches", "num_ops"),
        **_figures(timeline, "makespan_us", "span_us", "bubble_fraction", "idle_us", "peak_memory_bytes"),
        "limit_bytes": placement.cluster.limit_bytes,
        "transfers": transfers_text(placement),
    }


def of_search(result: SearchResult) -> dict[str, Any]:
    """What was minimized, the value and its lower bound, how the plan was found, and the named schedules."""
    return {
        **_figures(result, "objective", "value_us", "bound_us", "gap", "why", "how", "period_us", "among"),
        **_figures(result, "elapsed_s", "stopped_by"),
        "named": [asdict(schedule) for schedule in result.named],
    }


def of_batch(batch: BatchPlan) -> dict[str, Any]:
    """The micro-batches of a batch, its plan, and the bound among each set of plans."""
    return {
        "groups": [list(group) for group in batch.groups],
        "bounds": [{"us": bound.us, "among": bound.among, "why": bound.why} for bound in batch.bounds],
        **of_timeline(batch.timeline),
    }


def of_layers(layers: LayerCosts) -> dict[str, Any]:
    """What each layer costs at one number of rows, and why the figures may be wrong."""
    costs = ("forward_us", "backward_us", "kept_bytes", "static_bytes", "spread")
    return {
        **_figures(layers, "rows", "note", "cuts", "contents", *costs, "why_doubtful"),
        "why_incomplete": layers.why_incomplete if layers.uncounted else "",
    }


def of_sizes(model: SizeModel, cuts: Sequence[str]) -> dict[str, Any]:
    """The fitted terms (constant, per token, per square) of each stage."""
    names = ("forward_us", "backward_us", "activation_bytes")
    terms = {name: [curve._asdict() for curve in getattr(model, name)] for name in names}
    return {"cuts": cuts, "error": model.error, **terms}


def of_trace(trace: ImportedTrace) -> dict[str, Any]:
    """Which step of the traces it is, and what is known about the run."""
    return _figures(trace, "step", "num_steps", "clock_shifts_us", "hosts", "world_size", "on_cpu")


def of_checkpoint(saved: Saved) -> dict[str, Any]:
    """What a checkpoint holds."""
    manifest = saved.manifest
    return {
        "name": saved.path.name,
        **_figures(manifest, "step", "num_ranks", "num_replicas"),
        "num_weights": len(manifest.names),
        "num_files": len(manifest.files),
        "num_bytes": saved.num_bytes,
        "extra": manifest.extra,
    }


def of_comparison(compared: Comparison) -> dict[str, Any]:
    """Both makespans, the parts of their difference, and a row per stage and kind."""
    return {
        "planned": of_timeline(compared.planned),
        "measured": of_timeline(compared.measured),
        "difference_us": compared.difference_us,
        "parts_us": {str(part): us for part, us in compared.parts_us.items()},
        "rows": [{**asdict(row), "kind": row.kind.value} for row in compared.rows],
        "num_cores": compared.num_cores,
    }


def of_calibration(calibration: Calibration) -> dict[str, Any]:
    """What was planned, measured and predicted, and the plans for the measured costs."""
    return {
        **_figures(calibration, "planned_us", "measured_us", "predicted_us", "gain"),
        "candidates": [{"name": plan.name, "makespan_us": plan.makespan_us} for plan in calibration.candidates],
        "keeps_plan": calibration.chosen is calibration.plan,
    }


def of_frontier(frontier: Frontier) -> dict[str, Any]:
    """The points of the curve and its lower bounds."""
    return {
        "points": [
            _figures(point, "limit_bytes", "peak_bytes", "us_per_microbatch", "bound_us") for point in frontier.points
        ],
        "bounds": [{"limit_bytes": limit, "us_per_microbatch": float(us)} for limit, us in frontier.bounds],
        "untried_limit_bytes": frontier.untried,
        "stopped_by": frontier.stopped_by,
    }


def of_answer(answer: Answer) -> dict[str, Any]:
    """The recommended plan, the others, and what to know about the figures."""
    return {
        "best": _candidate(answer.best),
        "candidates": [_candidate(candidate) for candidate in answer.candidates],
        "one_process_us": None if answer.one_process is None else answer.one_process.step_us,
        **_figures(answer, "rows_per_s", "bound_us", "bound_holds", "assumptions", "predicted_because"),
        **_figures(answer, "tolerance", "num_rounds", "elapsed_s", "stopped_by", "ran_out", "remarks"),
    }


def _candidate(candidate: Contender) -> dict[str, Any]:
    layout = candidate.candidate.layout
    return {
        **_figures(layout, "num_ranks", "num_replicas"),
        **_figures(candidate, "schedule", "step_us", "bound_us"),
        "is_measured": candidate.steps is not None,
        "bound_holds": "for every order of the same ops, by their predicted times",
        "predicted": of_timeline(candidate.timeline),
    }


def of_bounds(objectives: Sequence[tuple[str, int, Sequence[Any]]]) -> dict[str, Any]:
    """For each objective the plan's value, and the bounds, the highest first."""
    return {
        objective: {
            "value_us": value_us,
            "bound_us": bounds[0].us,
            "bounds": [{"us": bound.us, "name": bound.name, "why": bound.why} for bound in bounds],
        }
        for objective, value_us, bounds in objectives
    }


# --- pictures ---------------------------------------------------------------------------------------------------------


def draw(
    timeline: Timeline,
    output: str,
    above: Timeline | None,
    names: tuple[str, str],
    bound_us: int | None = None,
    *,
    quietly: bool = False,
) -> None:
    """Write a picture of `timeline`, under `above` if there is one; `names` are the files of both, `above`'s first."""
    if not output.lower().endswith((".html", ".json")):
        require("matplotlib", "draw")
    from rota.drawing import save

    names = Path(names[0]).name, Path(names[1]).name
    title = " over ".join(names) if above else names[1]
    save(timeline, output, above=above, names=names, title=title, bound_us=bound_us)
    if not quietly:
        print(f"Wrote {output}.")


def is_measured(timeline: Timeline) -> bool:
    """Whether the timeline's times differ from those that its plan's costs give."""
    return timeline != simulate(timeline.plan)
