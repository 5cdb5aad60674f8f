"""A process that plans batches while others run: lengths of samples in, plans out, one line of JSON each.

python -m rota.plan_server

    first line    {"options": {…}}, or {"function": "module:name", "options": {…}}
    request       {"lengths": [512, 33, …], "num_replicas": 2}
    answer        {"took_us": 52000, "is_searched": true, "replicas": [{"groups": [[3, 7], …], "plan": "…", …}, …]}
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
from typing import Any, NamedTuple, Protocol

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


class Answer(NamedTuple):
    """What a batch gets: per replica a plan; `is_searched`: not by rules alone."""

    replicas: Iterable[Grouped]
    is_searched: bool


#: Answers a request: the lengths, and the number of replicas.
Planning = Callable[[Sequence[int], int], Answer]

_PLACINGS = {"place": place, "interleaved": interleaved, "wave": wave}


def by_model(model: str, cluster: str, placing: str = "place", packed: bool = False, **options: Any) -> Planning:
    """`rota.plan_replicas` with JSON of a SizeModel and a Cluster, and the name of a function that places stages."""
    from rota.batching.serving import BatchServer

    costs, ranks = SizeModel.from_json(model), Cluster.from_json(cluster)
    server = BatchServer(costs, ranks, packed=packed, place=_PLACINGS[placing], **options)
    if server.compiles():
        print(
            "rota: the loops that search for the plans of batches are being compiled, once on this machine; until then "
            "batches have plans by simple rules",
            file=sys.stderr,
            flush=True,
        )

    def answer(lengths: Sequence[int], num_replicas: int) -> Answer:
        return Answer(*server.plan(lengths, num_replicas))

    return answer


def by_function(name: str, options: dict[str, Any]) -> Planning:
    """The user's own function, "module:function"."""
    module, _, function = name.partition(":")
    plan: Callable[..., Iterable[Grouped]] = getattr(importlib.import_module(module), function)

    def answer(lengths: Sequence[int], num_replicas: int) -> Answer:
        return Answer(plan(lengths, num_replicas, **options), is_searched=True)

    return answer


def main() -> None:
    """Answer requests until there are none."""
    requests, answers = sys.stdin, os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output is not for the caller
    first = json.loads(requests.readline())
    options = first["options"]
    plan = by_function(first["function"], options) if "function" in first else by_model(**options)
    for line in requests:
        answers.write(f"{json.dumps(_answer(plan, json.loads(line)))}\n")
        answers.flush()


def _answer(plan: Planning, request: dict[str, Any]) -> dict[str, Any]:
    begun_ns = time.monotonic_ns()
    try:
        found = plan(request["lengths"], request["num_replicas"])
        replicas = [
            {
                "groups": [[*group] for group in of_replica.groups],
                "plan": of_replica.plan.to_json(),
                "makespan_us": of_replica.makespan_us,
                "bound_us": of_replica.bound_us,
            }
            for of_replica in found.replicas
        ]
    except RotaError as error:
        return {"error": str(error)}
    except Exception:
        return {"error": f"the planner failed:\n{traceback.format_exc()}"}
    took_us = (time.monotonic_ns() - begun_ns) // 1000
    return {"took_us": took_us, "is_searched": found.is_searched, "replicas": replicas}


if __name__ == "__main__":
    main()
