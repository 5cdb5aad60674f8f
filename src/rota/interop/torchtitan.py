"""A plan for torchtitan: PyTorch's schedule CSV, and the modules of each stage as its config names them.

    schedule.csv        what `parallelism.pipeline_parallel_schedule_csv` names
    schedule_comms.csv  the same with the plan's order of messages, for `rota.interop.keep_order`
    parallelism.json    what `rota.interop.with_plan` sets in a config of torchtitan 0.3 or later, which is Python

Names are those of torchtitan's main branch after 0.3.0, which renamed `module_fqns_per_model_part` to
`pipeline_parallel_module_fqns_per_model_part`. Both are read. torchtitan puts stage i on rank i mod p, or for "V"
schedules two stages per rank, down the ranks and back up.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from rota.core import reading, schedule_csv
from rota.core.cluster import Cluster
from rota.core.costs import Costs, assumed_costs
from rota.core.errors import FormatError, ScheduleError, SplitError
from rota.core.placing import place
from rota.core.plan import Plan
from rota.core.reading import Field, Positive, short
from rota.core.simulation import check
from rota.core.tasks import Kind
from rota.core.text import count_text
from rota.interop.layer_boundaries import MOST_LAYERS, stage_costs

Parts: TypeAlias = tuple[tuple[str, ...], ...]

FILES = ("schedule.csv", "schedule_comms.csv", "parallelism.json")
_PARTS, _PARTS_IN_0_3_0 = NAMES_OF_PARTS = (
    "pipeline_parallel_module_fqns_per_model_part",
    "module_fqns_per_model_part",
)
_ROWS = "pipeline_parallel_microbatch_size"
_REPLICATE, _SHARD = DEGREES = ("data_parallel_replicate_degree", "data_parallel_shard_degree")
#: By these names torchtitan chooses the ranks; the CSV has the order.
_LOOP, _V = "PipelineScheduleMulti", "ZBVZeroBubble"
_V_SCHEDULES = (_V.lower(), "dualpipev")
_NAME = re.compile(r"[\w-]{1,200}(\.[\w-]{1,200})*", re.ASCII)


class Imported(NamedTuple):
    """A plan, for each of its stages the names of its modules, and what a config says besides.

    Attributes:
        plan: The plan.
        parts: The names of each stage's modules.
        schedule: The schedule by which torchtitan puts stages on ranks.
        microbatch_rows: Rows per micro-batch; torchtitan's default is 1.
        num_replicas: Number of pipelines, by the degrees of data parallelism; None: any number.
    """

    plan: Plan
    parts: Parts
    schedule: str = _LOOP
    microbatch_rows: int = 1
    num_replicas: int | None = None

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The stages' boundaries as in `rota.cutting`, with each module a layer."""
        return _boundaries(self.parts)


def _boundaries(parts: Parts) -> tuple[int, ...]:
    return tuple(accumulate(map(len, parts), initial=0))


# --- writing ----------------------------------------------------------------------------------------------------------


def export(parts: Sequence[Sequence[str]], plan: Plan, folder: str | Path) -> tuple[Path, ...]:
    """Write `FILES` into a new folder, with the texts of `render`. Raises what `render` raises."""
    texts = render(parts, plan, folder)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return tuple(texts)


def render(parts: Sequence[Sequence[str]], plan: Plan, folder: str | Path) -> dict[Path, str]:
    """The text of each of `FILES`; `parts`, one per stage, are as `module_parts` gives them.

    They name the CSV by a path in `folder`. Raises ScheduleError if torchtitan cannot run the plan, PlanError if the
    plan must not run, SplitError if the parts do not fit it, FormatError if the folder's name cannot be written.
    """
    check(plan)
    schedule = _schedule_of(plan)
    parts = _require_parts(parts, plan.num_stages)
    csv = (Path(folder) / FILES[0]).as_posix()
    if not csv.isprintable():
        raise FormatError(f"folder {str(folder)!r} has characters that a config cannot contain; use another")
    fields: dict[str, str | int] = {
        "pipeline_parallel_degree": plan.num_ranks,
        "pipeline_parallel_schedule": schedule,
        "pipeline_parallel_schedule_csv": csv,
        _ROWS: plan.microbatch_rows or 1,
        "num_pp_microbatches": plan.num_microbatches,
    }
    if plan.num_replicas > 1:  # with one pipeline, torchtitan may run any number: it adds them by itself
        fields |= {_REPLICATE: 1, _SHARD: plan.num_replicas}
    texts = plan.to_csv(), plan.to_csv(communication=True), _json(fields, parts)
    return {Path(folder) / name: text for name, text in zip(FILES, texts, strict=True)}


def batch_text(plan: Plan) -> str:
    """How many micro-batches of how many rows a step has, and the batch size to set in torchtitan."""
    rows, count, num_replicas = plan.microbatch_rows, plan.num_microbatches, plan.num_replicas
    size = f"training.local_batch_size = {rows * count if rows else f'{count} * {_ROWS}'}"
    if rows and num_replicas > 1:
        size += f" (global batch: {num_replicas} * {rows * count} = {num_replicas * rows * count} rows)"
    each_size = f"{count_text(rows, 'row')} each" if rows else "any size"
    per = f" in each of {num_replicas} pipelines" if num_replicas > 1 else ""
    return f"{count_text(count, 'micro-batch', 'es')} of {each_size}{per}: set {size}"


def degrees_text(plan: Plan) -> str:
    """What the degrees of data parallelism must be for the plan's pipelines."""
    num = plan.num_replicas
    return (
        f"{num} pipelines: {_REPLICATE} * {_SHARD} must be {num}; {_SHARD} = {num} has FSDP shard the weights over them"
    )


def _schedule_of(plan: Plan) -> str:
    """The schedule by which torchtitan puts stages on the plan's ranks. Raises ScheduleError if there is none."""
    placement = plan.placement
    schedule_csv.require_chain(placement, "or run it by rota.Pipeline")
    if all(task.kind is Kind.F for task in placement.tasks):
        raise ScheduleError("the plan has only forwards, but torchtitan trains: give one with backwards")
    on = [placement.ranks_of(stage)[0] for stage in range(placement.num_stages)]
    for schedule in (_LOOP, _V):
        if on == _homes(schedule, placement.num_stages, placement.num_ranks):
            return schedule
    raise ScheduleError(
        f"the plan's stages are on the ranks {short(on).strip('[]')}; torchtitan puts stage i on rank i mod "
        f"{placement.num_ranks} (rota.interleaved), or two per rank down and back up (rota.wave): place them so"
    )


def _homes(schedule: str, num_stages: int, num_ranks: int) -> list[int] | None:
    """The rank of each stage in torchtitan; None if it refuses the schedule."""
    if schedule.lower() in _V_SCHEDULES:
        return [*range(num_ranks), *reversed(range(num_ranks))] if num_stages == 2 * num_ranks else None
    return [stage % num_ranks for stage in range(num_stages)] if num_stages % num_ranks == 0 else None


def _require_parts(parts: Sequence[Sequence[str]], num_stages: int) -> Parts:
    """Raise SplitError unless each stage has a part, of names that torchtitan can find."""
    if len(parts) != num_stages:
        raise SplitError(f"there are {len(parts)} parts for {num_stages} stages; give one per stage")
    for part, names in enumerate(parts):
        for name in names:
            if not _NAME.fullmatch(name):
                raise SplitError(f"part {part} has {name[:60]!r}, which is not a module's name, such as layers.0")
        if len(set(names)) < len(names):
            raise SplitError(f"part {part} has {Counter(names).most_common(1)[0][0]} twice; remove one of them")
    return tuple(map(tuple, parts))


def _json(fields: dict[str, str | int], parts: Parts) -> str:
    """The fields, with a line per stage."""
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()]
    listed = ",\n".join(f"    {json.dumps(part)}" for part in parts)
    return "{\n" + ",\n".join([*lines, f'  "{_PARTS}": [\n{listed}\n  ]']) + "\n}\n"


# --- reading ----------------------------------------------------------------------------------------------------------


def load(path: str | Path, costs: Costs | None = None, cluster: Cluster | None = None) -> Imported:
    """The plan and parts of a config's fields, as JSON, and of the CSV that they name, beside it.

    `costs` are those of the stages, or of the modules in the parts' order; by default F lasts 1 ms and the backward
    2 ms. The plan is checked. Raises FormatError or SplitError for what torchtitan would refuse, PlacementError,
    PlanError.
    """
    text = reading.read_text(path)
    try:
        config = Field("parallelism", reading.load(text))
        parts = _parts(config)
        name = Path(_value(config, "pipeline_parallel_schedule_csv", str, "")).name
        if not (name.isprintable() and len(name) <= reading.LONGEST_NAME):
            raise config["pipeline_parallel_schedule_csv"].wrong("a file's name of printable characters, 1,000 at most")
    except (FormatError, SplitError) as error:
        raise type(error)(f"{path}: {error}") from None
    if not name:
        raise FormatError(f'{path} names no schedule; set pipeline_parallel_schedule_csv = "schedule.csv"')
    beside = Path(path).parent / name  # and nowhere else: what a file names is not to be read from anywhere
    csv = reading.read_text(beside)
    try:
        plan = _plan(csv, config, parts, costs, cluster)
    except FormatError as error:
        raise FormatError(f"{beside}: {error}") from None
    check(plan)
    rows = _value(config, _ROWS, Positive, 1)
    return Imported(plan, parts, _value(config, "pipeline_parallel_schedule", str, _LOOP), rows, _num_replicas(config))


def _num_replicas(config: Field) -> int | None:
    """The product of the degrees; None if one of them is missing or -1, which stands for all GPUs that are left."""
    if not all(name in config for name in DEGREES) or config[_SHARD].value == -1:
        return None
    return int(config[_REPLICATE].read(Positive) * config[_SHARD].read(Positive))


def _parts(config: Field) -> Parts:
    present = [name for name in NAMES_OF_PARTS if name in config and config[name].value is not None]
    if len(present) != 1:
        count = "both" if present else "neither"
        raise FormatError(
            f"{config.path} has {count} of {_PARTS} and {_PARTS_IN_0_3_0}; give one, a list of names per stage"
        )
    parts = config[present[0]].read(list[list[str]])
    if not 0 < len(parts) <= MOST_LAYERS:
        raise FormatError(f"{config.path}.{present[0]} has {len(parts):,} parts; give 1 to {MOST_LAYERS:,}")
    return _require_parts(parts, len(parts))


def _value(config: Field, name: str, kind: Any, default: Any) -> Any:
    return config[name].read(kind) if name in config else default


def _plan(csv: str, config: Field, parts: Parts, costs: Costs | None, cluster: Cluster | None) -> Plan:
    orders = schedule_csv.read(csv)
    on = schedule_csv.stage_ranks(orders)
    if len(on) != len(parts):
        raise FormatError(f"the CSV runs {len(on)} stages, but there are {len(parts)} parts; give one per stage")
    num_ranks = _value(config, "pipeline_parallel_degree", Positive, len(orders))
    if num_ranks != len(orders):
        raise FormatError(
            f"the CSV has {len(orders)} lines for pipeline_parallel_degree = {num_ranks}; it needs as many"
        )
    schedule = _value(config, "pipeline_parallel_schedule", str, _LOOP)
    if on != (homes := _homes(schedule, len(on), num_ranks)):
        placed = "not at all" if homes is None else f"on {short(homes).strip('[]')}"
        raise FormatError(
            f"the CSV has the stages on the ranks {short(on).strip('[]')}; for {short(schedule)} torchtitan puts "
            f"them {placed}; change pipeline_parallel_schedule ({_LOOP} or {_V}) or the CSV"
        )
    costs = assumed_costs(len(parts)) if costs is None else stage_costs(costs, _boundaries(parts))
    kinds = {op.kind for order in orders for op in order}
    costs = costs.with_split_backward() if Kind.W in kinds else costs
    placement = place(costs, cluster or Cluster.uniform(num_ranks), on)
    return Plan.from_csv(csv, placement if kinds - {Kind.F} else placement.forward_only())
