"""The commands that measure a plan's model and plan it again, to cut it elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import count, groupby

from rota.calibration.spread import copies
from rota.core.cluster import Cluster, Link
from rota.core.plan import Plan
from rota.core.units import exact_size_text

_MEASURED, _ON_CPU = "measured on ", ("measured on CPU", ", 1 thread")  # in notes of measured costs


def commands(plan: Plan) -> tuple[str, ...]:
    """What to run, in this order, to cut the model again for the same ranks, memory, rows and trainer.

    MODEL.py stands for the model's file, and ROWS for the rows of a step if the plan does not say them. Outputs have
    names that are free in the current folder. Times that were estimated for a device are estimated again, and its links
    stay: LINKS.json stands for a file with them, if they differ. DEVICE stands for the accelerator that was measured,
    such as cuda. There are no commands if the times were estimated for an unknown device.
    """
    usage, rows = plan.usage, plan.microbatch_rows
    device = None if usage is None else usage.estimated_for
    if usage is not None and usage.is_estimate and device is None:
        return ()
    replicas = 1 if usage is None else usage.num_replicas
    num_ranks, profile = plan.num_ranks * replicas, free_name("profile.json")
    batch = "ROWS" if rows is None else rows * plan.num_microbatches * replicas
    places = () if usage is None else usage.places
    cuts = f" --cuts '{patterns(places)}'" if places else ""
    there = "" if device is None else f" --device {device}"
    if usage is not None and usage.note.startswith(_MEASURED) and not any(one in usage.note for one in _ON_CPU):
        there = " --device DEVICE"
    found = [f"rota profile MODEL.py{there}{cuts} --rows {_rows_text(rows)} -o {profile}"]
    links = "" if device is None else _given_links(plan.placement.cluster)
    if plan.placement.routes and device is None:
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
        f"{' --copies' if copies(plan.placement) < plan.placement.num_stages else ''}"
        f"{' --exportable' if usage is not None and usage.exportable else ''}"
        f"{' --whole-backward' if usage is not None and usage.whole_backward else ''} -o {free_name('better.json')}"
    )
    return tuple(found)


def _given_links(cluster: Cluster) -> str:
    """The option of `rota autoplan` that gives the links of a cluster; "" if transfers cost nothing."""
    if cluster.links or cluster.shared:
        return " --links LINKS.json"
    link = cluster.link
    if link == Link():
        return ""
    rate = "" if link.bytes_per_us is None else f"{exact_size_text(link.bytes_per_us * 1_000_000)}/s"
    return f" --link {','.join(filter(None, (f'{link.latency_us}us', rate)))}"


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
