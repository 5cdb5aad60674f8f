"""DeepSpeed's cuts: a PipelineModule's `parts`, which are boundaries in its list of layers, as JSON.

[0, 3, 6, 8]        stage 0 has the layers 0 to 2, stage 1 has 3 to 5, stage 2 has 6 and 7
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from rota import cutting
from rota.core import reading
from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.placing import place
from rota.core.plan import Plan
from rota.core.reading import Field, Whole
from rota.interop.layer_boundaries import has_order_of, require_boundaries, stage_costs
from rota.schedules import NAMED
from rota.schedules.common import require_chain_on


def read_boundaries(text: str) -> tuple[int, ...]:
    """The boundaries in a JSON list. Raises FormatError or SplitError with the entry."""
    return require_boundaries(Field("boundaries", reading.load(text)).read(tuple[Whole, ...]))


def write_boundaries(boundaries: Sequence[int]) -> str:
    """The text that `read_boundaries` reads. Raises SplitError."""
    return json.dumps(require_boundaries(boundaries)) + "\n"


def is_uniform(boundaries: Sequence[int]) -> bool:
    """Whether `partition_method="uniform"` makes this cut."""
    return [*boundaries] == cutting.uniform(boundaries[-1], len(boundaries) - 1)


def boundaries_for(plan: Plan, boundaries: Sequence[int]) -> tuple[int, ...]:
    """The boundaries, if DeepSpeed can place the plan's stages as it does: a chain, one stage per rank.

    Raises ScheduleError or SplitError.
    """
    require_chain_on("DeepSpeed", plan.placement, range(plan.num_ranks), "rota.place(costs, cluster)")
    return require_boundaries(boundaries, plan.num_stages)


def runs_in_this_order(plan: Plan) -> bool:
    """Whether DeepSpeed, which runs 1F1B, runs the ops in the plan's order."""
    return has_order_of("1f1b", plan)


def plan_of(boundaries: Sequence[int], costs: Costs, num_microbatches: int, cluster: Cluster | None = None) -> Plan:
    """DeepSpeed's plan for this cut: 1F1B, one stage per rank; `costs` are those of its stages or of its layers.

    Raises SplitError or PlacementError.
    """
    num_stages = len(require_boundaries(boundaries)) - 1
    placement = place(stage_costs(costs, boundaries), cluster or Cluster.uniform(num_stages))
    return NAMED["1f1b"](placement, num_microbatches)
