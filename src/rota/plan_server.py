"""A process that plans batches while others run: lengths of samples in, plans out, one line of JSON each.

python -m rota.plan_server

    first line    {"function": "module:name", "options": {…}}
    request       {"lengths": [512, 33, …], "num_replicas": 2}
    answer        {"took_us": 52000, "replicas": [{"groups": [[3, 7], …], "plan": "…", …}, …]}, or {"error": "…"}

It ends when its input does, so it never outlives the process that has started it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from rota.costs import Cluster
from rota.errors import RotaError
from rota.placing import interleaved, place, wave
from rota.plan import Plan
from rota.sizes import SizeModel


class Grouped(Protocol):
    """What a function that plans batches returns for each replica.

    `groups[m]`: the samples of micro-batch m of `plan`, as indices into the lengths that it was given.
    """

    @property
    def groups(self) -> Sequence[Sequence[int]]: ...  # noqa: D102
    @property
    def plan(self) -> Plan: ...  # noqa: D102
    @property
    def makespan_us(self) -> int: ...  # noqa: D102
    @property
    def bound_us(self) -> int: ...  # noqa: D102


_PLACINGS = {"place": place, "interleaved": interleaved, "wave": wave}


def plan_by_model(
    lengths: Sequence[int], num_replicas: int, model: str, cluster: str, placing: str = "place", **options: Any
) -> Iterable[Grouped]:
    """`rota.plan_replicas` with JSON of a SizeModel and a Cluster, and the name of a function that places stages."""
    from rota.batching import plan_replicas

    costs, ranks = SizeModel.from_json(model), Cluster.from_json(cluster)
    return plan_replicas(costs, ranks, lengths, num_replicas, place=_PLACINGS[placing], **options)


def main() -> None:
    """Answer requests until there are none."""
    requests, answers = sys.stdin, os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output is not for the caller
    first = json.loads(requests.readline())
    module, _, name = first["function"].partition(":")
    plan: Callable[..., Iterable[Grouped]] = getattr(importlib.import_module(module), name)
    for line in requests:
        answers.write(f"{json.dumps(_answer(plan, json.loads(line), first['options']))}\n")
        answers.flush()


def _answer(plan: Callable[..., Iterable[Grouped]], request: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    begun_ns = time.monotonic_ns()
    try:
        replicas = [
            {
                "groups": [[*group] for group in found.groups],
                "plan": found.plan.to_json(),
                "makespan_us": found.makespan_us,
                "bound_us": found.bound_us,
            }
            for found in plan(request["lengths"], request["num_replicas"], **options)
        ]
    except RotaError as error:
        return {"error": str(error)}
    except Exception:
        return {"error": f"the planner failed:\n{traceback.format_exc()}"}
    return {"took_us": (time.monotonic_ns() - begun_ns) // 1000, "replicas": replicas}


if __name__ == "__main__":
    main()
