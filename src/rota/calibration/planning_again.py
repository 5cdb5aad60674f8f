"""The commands that measure a plan's model and plan it again, to cut it elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import count, groupby

from rota.plan import Plan
from rota.units import exact_size_text


def commands(plan: Plan) -> tuple[str, ...]:
    """What to run, in this order, to cut the model again for the same ranks, memory, rows and trainer.

    MODEL.py stands for the model's file, and ROWS for the rows of a step if the plan does not say them. Outputs have
    names that are free in the current folder.
    """
    usage, rows = plan.usage, plan.microbatch_rows
    replicas = 1 if usage is None else usage.num_replicas
    num_ranks, profile = plan.num_ranks * replicas, free_name("profile.json")
    batch = "ROWS" if rows is None else rows * plan.num_microbatches * replicas
    places = () if usage is None else usage.places
    cuts = f" --cuts '{patterns(places)}'" if places else ""
    found = [f"rota profile MODEL.py{cuts} --rows {_rows_text(rows)} -o {profile}"]
    links = ""
    if plan.placement.routes:
        cluster = free_name("cluster.json")
        found.append(f"rota profile links --processes {num_ranks} -o {cluster}")
        links = f" --links {cluster}"
    pipeline = plan.num_ranks if usage is None else usage.pipeline_ranks  # without usage, ranks were chosen by hand
    limits = {*plan.placement.cluster.limit_bytes}
    limit = limits.pop() if len(limits) == 1 else None
    found.append(
        f"rota autoplan --profile {profile}{links} --ranks {num_ranks}"
        f"{'' if pipeline is None else f' --pipeline {pipeline}'}"
        f"{'' if limit is None else f' --memory {exact_size_text(limit)}'} --batch {batch}"
        f"{' --exportable' if usage is not None and usage.exportable else ''}"
        f"{' --whole-backward' if usage is not None and usage.whole_backward else ''} -o {free_name('better.json')}"
    )
    return tuple(found)


def free_name(name: str) -> str:
    """The name of a file that the current folder does not have: profile.json, else profile2.json and so on."""
    stem, suffix = os.path.splitext(name)
    names = (f"{stem}{'' if i == 1 else i}{suffix}" for i in count(1))
    return next(one for one in names if not os.path.lexists(one))


def patterns(places: Sequence[str]) -> str:
    """What `--cuts` takes for these places: `layers.*` for the entries of one list, if they are neighbours."""
    found: list[str] = []
    for parent, of_one in groupby(places, key=lambda place: place.rpartition(".")[0]):
        names = [place.rpartition(".")[2] for place in of_one]
        numbers = [int(name) for name in names if name.isdecimal()]
        are_neighbours = len(numbers) == len(names) > 1 and numbers == [*range(numbers[0], numbers[0] + len(numbers))]
        found += [f"{parent}.*"] if parent and are_neighbours else [f"{parent}.{name}".lstrip(".") for name in names]
    return ",".join(dict.fromkeys(found))


def _rows_text(rows: int | None) -> str:
    """Sizes of micro-batches to choose from: the plan's, and half and twice as many rows."""
    return "1,2,4,8" if rows is None else ",".join(str(one) for one in (rows // 2, rows, 2 * rows) if one)
