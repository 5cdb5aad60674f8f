"""A process that plans batches while others run: lengths of samples in, plans out, one line of JSON each.

python -m rota.plan_server

    first line    {"function": "module:name", or null for `rota.plan_replicas`, "options": {…}}
    request       {"lengths": [512, 33, …], "num_replicas": 2}
    answer        {"took_us": 52000, "replicas": [{"groups": [[3, 7], …], "plan": "…", …}, …]}
                  or {"error": "…"}

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
from functools import partial
from typing import Any, Protocol

from rota.core.cluster import Cluster
from rota.core.errors import RotaError
from rota.core.placing import interleaved, place, wave
from rota.core.plan import Plan
from rota.core.sizes import SizeModel


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


#: What a request gets, for its lengths and number of replicas: a plan per replica.
Planning = Callable[[Sequence[int], int], Iterable[Grouped]]

_PLACINGS = {"place": place, "interleaved": interleaved, "wave": wave}


def by_model(model: str, cluster: str, placing: str = "place", packed: bool = False, **options: Any) -> Planning:
    """`rota.plan_replicas` with JSON of a SizeModel and a Cluster, and the name of a function that places stages."""
    from rota.batching import is_compiled, plan_replicas

    costs, ranks = SizeModel.from_json(model), Cluster.from_json(cluster)
    if not is_compiled():
        print(
            "rota: the loops that search for the plans of batches are being compiled, once on this machine; the first "
            "batch waits for it",
            file=sys.stderr,
            flush=True,
        )
    return partial(plan_replicas, costs, ranks, packed=packed, place=_PLACINGS[placing], **options)


def main() -> None:
    """Answer requests until there are none."""
    requests, answers = sys.stdin, os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output is not for the caller
    first = json.loads(requests.readline())
    if first["function"] is None:
        plan = by_model(**first["options"])
    else:
        module, _, function = first["function"].partition(":")
        plan = partial(getattr(importlib.import_module(module), function), **first["options"])
    for line in requests:
        answers.write(f"{json.dumps(_answer(plan, json.loads(line)))}\n")
        answers.flush()


def _answer(plan: Planning, request: dict[str, Any]) -> dict[str, Any]:
    begun_ns = time.monotonic_ns()
    try:
        replicas = [
            {
                "groups": [[*group] for group in replica.groups],
                "plan": replica.plan.to_json(),
                "makespan_us": replica.makespan_us,
                "bound_us": replica.bound_us,
            }
            for replica in plan(request["lengths"], request["num_replicas"])
        ]
    except RotaError as error:
        return {"error": str(error)}
    except Exception:
        return {"error": f"the planner failed:\n{traceback.format_exc()}"}
    took_us = (time.monotonic_ns() - begun_ns) // 1000
    return {"took_us": took_us, "replicas": replicas}


if __name__ == "__main__":
    main()
