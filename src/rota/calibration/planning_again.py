"""The command that plans a plan's model again, to cut it elsewhere."""

from __future__ import annotations

from rota.plan import Plan
from rota.units import exact_size_text


def autoplan_command(plan: Plan) -> str:
    """The command that plans the model for the same ranks, memory, rows and trainer; "…" for what no plan says.

    Links are not in it: those of the plan may have been measured.
    """
    usage, limits = plan.usage, {*plan.placement.cluster.limit_bytes}
    limit = limits.pop() if len(limits) == 1 else None
    memory = "" if limit is None else f" --memory {exact_size_text(limit)}"
    replicas = 1 if usage is None else usage.num_replicas
    batch = "…" if usage is None else usage.microbatch_rows * plan.num_microbatches * replicas
    pipeline = plan.num_ranks if usage is None else usage.pipeline_ranks  # without usage, ranks were chosen by hand
    return (
        f"rota autoplan --profile profile.json --ranks {plan.num_ranks * replicas}"
        f"{'' if pipeline is None else f' --pipeline {pipeline}'}{memory} --batch {batch}"
        f"{' --exportable' if usage is not None and usage.exportable else ''}"
        f"{' --whole-backward' if usage is not None and usage.whole_backward else ''} -o better.json"
    )
