"""Plans for a run that does not wait: by rules until the loops of the search are compiled, then searched."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from numba.core.registry import CPUDispatcher

import rota
from batching.test_planning import model
from rota import Cluster, SearchError, Size
from rota.batching.by_name import plan_replicas_by_name
from rota.batching.serving import BatchServer
from support.recount import recount, step_end_times

LENGTHS = [3, 40, 7, 7, 25, 12, 5, 31, 18, 2, 9, 14, 22, 6]


def signatures() -> list[tuple[str, int]]:
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("rota.batching.")]
    loops = [value for module in modules for value in vars(module).values() if isinstance(value, CPUDispatcher)]
    return [(loop.py_func.__qualname__, len(loop.signatures)) for loop in loops]


@pytest.mark.parametrize(
    ("place", "stages", "packed", "split", "limit"),
    [
        (rota.place, 3, False, False, None),
        (rota.place, 3, True, True, 20_000),
        (rota.interleaved, 6, False, True, 20_000),
        (rota.wave, 6, True, False, 20_000),
    ],
)
def test_plans_by_rules_fit_and_need_no_loop(
    place: Any, stages: int, packed: bool, split: bool, limit: int | None
) -> None:
    costs, cluster, before = model(stages, split), Cluster.uniform(3, limit, latency_us=2), signatures()
    found = plan_replicas_by_name(costs, cluster, LENGTHS, 2, packed=packed, place=place)
    assert found is not None
    assert signatures() == before
    assert sorted(i for plan in found for group in plan.groups for i in group) == [*range(len(LENGTHS))]
    measure = Size.packed if packed else Size.padded
    for each in found:
        rota.check(each.plan)
        counted = recount(each.plan)
        assert each.makespan_us == max(counted.makespan_us, *(end for *_, end in step_end_times(each.plan, counted)))
        assert each.bound_us <= each.makespan_us
        assert limit is None or max(rota.simulate(each.plan).peak_memory_bytes) <= limit
        assert each.sizes == tuple(measure([LENGTHS[i] for i in group]) for group in each.groups)
        for m, size in enumerate(each.sizes):
            assert each.plan.placement.for_microbatch(m).tasks == place(costs.costs(size), cluster).tasks


def test_tight_memory_is_left_to_the_search_and_what_fits_nowhere_is_refused() -> None:
    costs = model(3, False)
    with pytest.raises(SearchError, match="sample 1 of length 40 fits in no micro-batch") as error:
        plan_replicas_by_name(costs, Cluster.uniform(3, 300), LENGTHS, 2, packed=False, place=rota.place)
    need = int(str(error.value).split("needs ")[1].split()[0])
    tight = Cluster.uniform(3, need + 100)
    assert plan_replicas_by_name(costs, tight, LENGTHS, 2, packed=False, place=rota.place) is None


@pytest.mark.parametrize(("place", "stages", "split"), [(rota.place, 3, False), (rota.wave, 6, True)])
def test_the_server_searches_once_its_loops_are_compiled(
    monkeypatch: pytest.MonkeyPatch, place: Any, stages: int, split: bool
) -> None:
    may_compile, compile_loops = threading.Event(), BatchServer._compile

    def wait_first(server: BatchServer) -> None:
        may_compile.wait()
        compile_loops(server)

    monkeypatch.setattr(BatchServer, "_compile", wait_first)
    monkeypatch.setattr("rota.batching.serving._LOADING_S", 0)
    costs, cluster = model(stages, split), Cluster.uniform(3, 20_000)
    server = BatchServer(costs, cluster, packed=False, place=place, tries=20)
    assert server.compiles()
    first = server.plan(LENGTHS, 2)
    assert not first.is_searched
    assert first.replicas == plan_replicas_by_name(costs, cluster, LENGTHS, 2, packed=False, place=place)
    may_compile.set()
    server._compiled.wait()
    before = signatures()
    then = server.plan(LENGTHS, 2)
    assert then.is_searched
    assert then.replicas == rota.plan_replicas(costs, cluster, LENGTHS, 2, place=place, tries=20)
    rota.plan_replicas(costs, Cluster.uniform(3, 20_000, latency_us=2), LENGTHS, 1, place=place)
    assert signatures() == before  # the exercise has compiled all that a search uses
