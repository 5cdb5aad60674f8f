"""Makes the 200 problems of this folder, always the same: python problems/make.py

The name of a problem says all that it is; `names.txt` lists them. A file that is there already keeps its plan, bound
and certificate as long as its problem is the same. A new or changed one gets them by a second of search, which
`python problems/run.py --update` then improves.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

from reference import Reference, bound_of

from rota import Cluster, Costs, Placement, bidirectional, interleaved, place, wave
from rota.core.cluster import Link
from rota.search import find_plan
from rota.search.bounds import least_memory
from rota.search.problem import Problem
from rota.shapes import SHAPES

FOLDER = Path(__file__).parent
FIRST_SEARCH_S = 1.0

#: F, I and W of all stages of a rank, and the latency of a transfer, in µs; the name says how long W is in % of F.
TIMES_US = {
    "w100": (10_000, 10_000, 10_000, 0),
    "w50": (18_500, 18_100, 9_300, 600),
    "w63": (29_850, 29_770, 18_870, 470),
}
#: Memory in what the first rank of 1F1B holds.
MEMORY = {"half": 0.5, "mem60": 0.6, "mem75": 0.75, "full": 1.0, "mem150": 1.5, "double": 2.0}
#: How each kind of pipeline places its stages, and how many stages a rank has if the name does not say it.
PIPELINES = {
    "chain": (place, 1),
    "wave": (wave, 2),
    "interleaved": (interleaved, 2),
    "bidirectional": (bidirectional, 1),
}

Fields = Mapping[str, str]


def problems() -> dict[str, tuple[str, Placement, int]]:
    """Name -> (family, placement, micro-batches) of each problem."""
    names = (FOLDER / "names.txt").read_text().split()
    assert len(set(names)) == len(names)
    return {name: problem(name) for name in names}


def problem(name: str) -> tuple[str, Placement, int]:
    """(family, placement, micro-batches) of the problem with this name."""
    for pattern, (family, make) in FAMILIES.items():
        if match := re.fullmatch(pattern, name):
            fields = {key: value or "" for key, value in match.groupdict().items()}
            return family, make(fields), int(fields["m"])
    raise ValueError(f"{name} is no name of a problem; its beginning says which pattern of FAMILIES it should match")


# --- families ---------------------------------------------------------------------------------------------------------


def pipeline(given: Fields) -> Placement:
    """Stages as equal as `uneven` says, in a chain; memory counts in what the first rank of 1F1B holds."""
    put, chunks = PIPELINES[given["kind"]]
    ranks, chunks = int(given["n"]), int(given["chunks"] or chunks)
    times, uneven = given["times"] or "w100", int(given["uneven"] or 0)
    seed = ranks * 1000 + int(given["m"])
    costs = chain_costs(ranks * chunks, times, chunks, given["back"] == "split", uneven, seed)
    limit = round(2 * chunks * ranks * MEMORY[given["memory"]])
    return put(costs, Cluster.uniform(ranks, limit, latency_us=TIMES_US[times][3]))


def chain_costs(num_stages: int, times: str, chunks: int, split: bool, uneven: int, seed: int) -> Costs:
    """Costs of a chain with `chunks` stages per rank, each stage's times ± `uneven` %."""
    forward, inputs, weights, _ = TIMES_US[times]
    chooser = Random(seed)
    factors = [chooser.uniform(1 - uneven / 100, 1 + uneven / 100) / chunks for _ in range(num_stages)]
    back = (inputs, weights) if split else (inputs + weights,)
    return Costs(*([round(us * factor) for factor in factors] for us in (forward, *back)), activation_bytes=2)


def tessel(given: Fields) -> Placement:
    """Tessel's shapes and costs: F takes 1, B 3, a stage that all ranks share 1 each way; a rank's own stages hold 1.

    Shared stages hold nothing, but for K's, which holds 1 on each rank.
    """
    shape, ranks, limit = given["shape"], int(given["n"]), int(given["limit"] or 0) or None
    num_stages = ranks + SHAPES[shape].shared
    shared = {"m": {0}, "nn": {0, 1 + ranks // 2}, "nn-eager": {0, 2}, "k": {ranks}}.get(shape, set())
    held = tuple(int(s not in shared or shape == "k") for s in range(num_stages))
    backward = tuple(1 if s in shared else 3 for s in range(num_stages))
    placement = SHAPES[shape].place(
        Costs((1,) * num_stages, backward, activation_bytes=held), Cluster.uniform(ranks, limit)
    )
    return placement if limit else placement.forward_only()


def graph(given: Fields) -> Placement:
    """A DAG of uneven stages, one per rank."""
    ranks, part = int(given["n"]), int(given["part"] or 0)
    chooser = Random(ranks + 100 * part)
    edges = GRAPHS[given["graph"]](ranks, part, int(given["length"] or 0), chooser)
    forward = [chooser.randrange(700, 1300) for _ in range(ranks)]
    back = (forward, [f // 2 for f in forward]) if given["back"] == "split" else ([2 * f for f in forward],)
    costs = Costs(forward, *back, activation_bytes=2, edges=edges)  # type: ignore[arg-type]
    return place(costs, Cluster.uniform(ranks, int(given["limit"]), latency_us=20))


Edges = list[tuple[int, int]]


def towers(ranks: int, number: int, length: int, _: Random) -> Edges:
    """Encoders side by side that all end in a trunk."""
    trunk = number * length
    inside = [(s, s + 1) for s in range(trunk) if s % length != length - 1]
    return (
        inside + [(s, trunk) for s in range(length - 1, trunk, length)] + [(s, s + 1) for s in range(trunk, ranks - 1)]
    )


def unet(ranks: int, *_: object) -> Edges:
    """A chain with skip connections from its first half to its second."""
    return [(s, s + 1) for s in range(ranks - 1)] + [(s, ranks - 1 - s) for s in range(ranks // 2 - 1)]


def cross_attention(ranks: int, *_: object) -> Edges:
    """An encoder, and a decoder all of whose stages read the encoder's output."""
    half = ranks // 2
    return [(s, s + 1) for s in range(ranks - 1) if s != half - 1] + [(half - 1, s) for s in range(half, ranks)]


def heads(ranks: int, number: int, *_: object) -> Edges:
    """A trunk whose output several heads read."""
    trunk = ranks - number
    return [(s, s + 1) for s in range(trunk - 1)] + [(trunk - 1, s) for s in range(trunk, ranks)]


def random_graph(ranks: int, _: int, __: int, chooser: Random) -> Edges:
    """Each stage reads one of the three before it, and sometimes the one before the last too."""
    edges = [(chooser.randrange(max(0, s - 3), s), s) for s in range(1, ranks)]
    return edges + [edge for s in range(ranks - 2) if (edge := (s, s + 2)) not in edges and chooser.random() < 0.4]


GRAPHS: Mapping[str, Callable[[int, int, int, Random], Edges]] = {
    "towers": towers, "unet": unet, "crossattention": cross_attention, "heads": heads, "random": random_graph
}  # fmt: skip


def transfers(given: Fields) -> Placement:
    """Transfers hold bytes on both sides; a rank has room for one micro-batch and `room` × 20 bytes more."""
    put, chunks = PIPELINES[given["kind"]]
    ranks, rate = int(given["n"]), int(given["rate"])
    if given["back"] == "split":
        costs = Costs.uniform(ranks * chunks, 100, 100, 80, activation_bytes=30, boundary_bytes=20)
    else:
        costs = Costs.uniform(ranks * chunks, 60, 120, activation_bytes=20, boundary_bytes=16, gradient_bytes=24)
    needs = least_memory(Problem(put(costs, Cluster.uniform(ranks)), 1))
    room = 20 * int(given["room"])
    return put(costs, Cluster(tuple(need.num_bytes + room for need in needs), Link(2, rate)))


def recompute(given: Fields) -> Placement:
    """Every `every`-th stage runs its forward again before its backward."""
    ranks, every = int(given["n"]), int(given["every"])
    again = tuple(900 if s % every == 0 else None for s in range(ranks))
    costs = Costs.uniform(ranks, 1000, 2000, activation_bytes=10, recompute_us=again, checkpoint_bytes=2)
    return place(costs, Cluster.uniform(ranks, 6 * ranks))


def step_end(given: Fields) -> Placement:
    """Uneven stages whose gradients are reduced, and whose optimizer steps come after all ops."""
    ranks, reduce_us = int(given["n"]), int(given["reduce"])
    costs = chain_costs(ranks, "w50", 1, True, 15, ranks)
    more = {"reduce_us": reduce_us, "optimizer_us": 1500, "static_bytes": 40}
    ended = replace(costs, **{name: (number,) * ranks for name, number in more.items()})
    return place(ended, Cluster.uniform(ranks, 40 + 2 * ranks))


def tensor_parallel(given: Fields) -> Placement:
    """Stages on pairs of ranks, and a last one on all of them; transfers hold bytes."""
    pairs = int(given["n"]) // 2
    costs = Costs.uniform(pairs + 1, 1000, 1900, activation_bytes=300, boundary_bytes=40)
    where = [*((2 * s, 2 * s + 1) for s in range(pairs)), range(2 * pairs)]
    return place(costs, Cluster.uniform(2 * pairs, 600 * pairs + 500, 10, 100), where)


def two_links(given: Fields) -> Placement:
    """Nodes of two ranks: slow links between nodes, and less memory towards the end of the chain."""
    ranks = int(given["n"])
    pairs = [(s, s + 1) for s in range(1, ranks - 1, 2)]
    slow = tuple((*pair, Link(4000)) for a, b in pairs for pair in ((a, b), (b, a)))
    limits = tuple(ranks + 2 * (ranks - s) for s in range(ranks))
    return place(chain_costs(ranks, "w63", 1, True, 30, ranks), Cluster(limits, Link(200), slow))


SIZE = r"(?P<n>\d+)x(?P<m>\d+)"
#: Pattern of the name -> (family, maker of the placement).
FAMILIES: Mapping[str, tuple[str, Callable[[Fields], Placement]]] = {
    r"(?P<kind>chain|wave|interleaved|bidirectional)-(?P<n>\d+)x((?P<chunks>\d+)x)?(?P<m>\d+)-(?P<back>split|whole)-"
    r"(?P<memory>[a-z]+\d*)(-(?P<times>w\d+))?(-uneven(?P<uneven>\d+))?": ("pipeline", pipeline),
    rf"(?P<shape>v|x|m|nn|nn-eager|k)-{SIZE}-(limit(?P<limit>\d+)|forward)": ("tessel", tessel),
    rf"dag-(?P<graph>[a-z]+)(?P<part>\d*)(x(?P<length>\d+))?-{SIZE}-(?P<back>split|whole)-limit(?P<limit>\d+)": (
        "dag", graph
    ),
    rf"transfers-(?P<kind>[a-z]+)-{SIZE}-(?P<back>split|whole)-room(?P<room>\d+)-rate(?P<rate>\d+)": (
        "transfers", transfers
    ),
    rf"recompute-{SIZE}-every(?P<every>\d+)": ("recompute", recompute),
    rf"stepend-{SIZE}-reduce(?P<reduce>\d+)": ("step end", step_end),
    rf"tensorparallel-{SIZE}": ("tensor parallel", tensor_parallel),
    rf"twolinks-{SIZE}": ("two links", two_links),
}  # fmt: skip


def main() -> None:
    """Write what is missing or has changed."""
    wanted = problems()
    for path in FOLDER.glob("*.json"):
        if path.stem not in wanted:
            sys.exit(f"{path} is not in names.txt; list or remove it")
    for name, (family, placement, num_microbatches) in wanted.items():
        path = FOLDER / f"{name}.json"
        if not (path.exists() and Reference.read(path).is_of(placement, num_microbatches)):
            result = find_plan(placement, num_microbatches, time_limit_s=FIRST_SEARCH_S)
            Reference(name, family, result.plan, result.how, *bound_of(result)).write(path)
            print(path.name, flush=True)


if __name__ == "__main__":
    main()
