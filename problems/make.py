"""Makes the 200 problems of this folder, always the same: python problems/make.py

A file that is there already keeps its plan, bound and certificate as long as its problem is the same. A new or changed
problem gets a first plan and bound by a second of search; `rota bench-search problems --update` then improves both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import NamedTuple

from rota import Cluster, Costs, Placement, bidirectional, interleaved, place, wave
from rota.costs import Link
from rota.errors import RotaError
from rota.reference import Reference
from rota.search.bounds import least_memory
from rota.search.problem import Problem
from rota.shapes import SHAPES

FOLDER = Path(__file__).parent
FIRST_SEARCH_S = 1.0

#: F, I and W of one stage per rank, and the latency of a transfer, in µs; the name says how long W is in % of F.
TIMES_US = {
    "w100": (10_000, 10_000, 10_000, 0),
    "w50": (18_500, 18_100, 9_300, 600),
    "w63": (29_850, 29_770, 18_870, 470),
}
#: Memory in what the first rank of 1F1B holds.
MEMORY = {"half": 0.5, "mem60": 0.6, "mem75": 0.75, "full": 1.0, "mem150": 1.5, "double": 2.0}


class Made(NamedTuple):
    """One problem.

    Attributes:
        name: What it is; also the name of its file.
        family: Problems that are alike.
        placement: Tasks, edges, ranks, links and limits.
        num_microbatches: Micro-batches of the step, over all data streams.
    """

    name: str
    family: str
    placement: Placement
    num_microbatches: int


def problems() -> list[Made]:
    """All problems; their names differ."""
    families = (tessel, chains, waves, interleaves, both_ways, graphs, transfers, mixtures, large)
    made = [Made(name, family.__name__, *rest) for family in families for name, *rest in family()]
    assert len({one.name for one in made}) == len(made)
    return made


def costs_of(num_stages: int, times: str, chunks: int, split: bool, uneven: int, seed: int) -> tuple[Costs, int]:
    """Costs of a chain with `chunks` stages per rank, each stage's times ± `uneven` %; and the latency."""
    forward, inputs, weights, latency = TIMES_US[times]
    chooser = Random(seed)
    factors = [chooser.uniform(1 - uneven / 100, 1 + uneven / 100) / chunks for _ in range(num_stages)]
    back = (inputs, weights) if split else (inputs + weights,)
    return Costs(*([round(us * factor) for factor in factors] for us in (forward, *back)), activation_bytes=2), latency


Placed = tuple[str, Placement, int]
Place = Callable[[Costs, Cluster], Placement]


def pipeline(
    kind: str,
    put: Place,
    ranks: int,
    microbatches: int,
    memory: str,
    times: str = "w100",
    chunks: int = 1,
    split: bool = True,
    uneven: int = 0,
) -> Placed:
    """One problem of a chain; its memory counts in what 1F1B's first rank holds with the same layers."""
    size = (
        f"{ranks}x{microbatches}"
        if chunks == 1 or kind == "wave" and chunks == 2
        else f"{ranks}x{chunks}x{microbatches}"
    )
    name = f"{kind}-{size}-{'split' if split else 'whole'}-{memory}" + (f"-{times}" if times != "w100" else "")
    name += f"-uneven{uneven}" if uneven else ""
    costs, latency = costs_of(ranks * chunks, times, chunks, split, uneven, seed=ranks * 1000 + microbatches)
    limit = round(2 * chunks * ranks * MEMORY[memory])
    return name, put(costs, Cluster.uniform(ranks, limit, latency_us=latency)), microbatches


# --- families ---------------------------------------------------------------------------------------------------------


def tessel() -> Iterator[Placed]:
    """Tessel's shapes with Tessel's costs: F takes 1, B takes 3, stages that all ranks share take 1 each way."""
    steps = [
        *product([4], "v", (3, 4), [128]), *product([4], "x", (2, 3, 4), [128]),
        *product([4], ("m", "nn"), (3, 4, 6), [128]), *product([4], ["nn-eager"], (3, 6), [128]),
        *product([4], "k", (3, 4, 6), [128]), (4, "v", 2, 12), *product([4], "x", (2, 3), [8]),
        (4, "m", 2, 8), *product([4], ["nn"], (2, 4), [8]), (4, "nn-eager", 3, 8), *product([4], "k", (2, 3), [8]),
        *product([8], "v", (4, 6, 8), [64]), *product([8], "x", (4, 6, 8), [128]), *product([8], "m", (5, 20), [64]),
        *product([8], ["nn"], (3, 6, 20), [64]), *product([8], ["nn-eager"], (6, 20), [64]),
        (8, "k", 8, 64), (16, "v", 16, 64), *product([16], ("nn", "k"), [60], [64]),
    ]  # fmt: skip
    for ranks, shape, limit, microbatches in steps:
        yield f"{shape}-{ranks}x{microbatches}-limit{limit}", tessel_shape(shape, ranks, limit), microbatches
    for shape in ("nn", "k"):
        yield f"{shape}-8x64-forward", tessel_shape(shape, 8, None).forward_only(), 64


def tessel_shape(shape: str, ranks: int, limit: int | None) -> Placement:
    """A rank's own stages hold 1; those that are shared hold nothing, but for K's, which holds 1 on each rank."""
    num_stages = ranks + SHAPES[shape].shared
    shared = {"m": {0}, "nn": {0, 1 + ranks // 2}, "nn-eager": {0, 2}, "k": {ranks}}.get(shape, set())
    held = tuple(int(s not in shared or shape == "k") for s in range(num_stages))
    backward = tuple(1 if s in shared else 3 for s in range(num_stages))
    costs = Costs((1,) * num_stages, backward, activation_bytes=held)
    return SHAPES[shape].place(costs, Cluster.uniform(ranks, limit))


def chains() -> Iterator[Placed]:
    """One stage per rank with split backward, as for the zero-bubble schedules; tight memory; uneven stages."""
    for ranks, memory in product((4, 8, 16, 32), ("full", "mem150", "double")):
        for times in ("w100", "w50", "w63") if ranks in (8, 16) and memory != "double" else ("w50",):
            yield pipeline("chain", place, ranks, ranks * (3 if memory == "full" else 2), memory, times)
    for ranks, memory, uneven in product((8, 16), ("half", "mem60", "mem75"), (0, 30)):
        yield pipeline("chain", place, ranks, 4 * ranks, memory, uneven=uneven)
    for ranks in (8, 16):
        yield pipeline("chain", place, ranks, 2 * ranks, "full", "w63", uneven=15)
    for ranks, memory, uneven in ((4, "half", 0), (8, "mem75", 30), (16, "full", 30), (32, "full", 15)):
        yield pipeline("chain", place, ranks, 3 * ranks, memory, "w50", split=False, uneven=uneven)


def waves() -> Iterator[Placed]:
    """Chains that go down the ranks and back up: V schedules, and Hanayo's waves."""
    for ranks, memory in product((4, 8, 16, 32), ("half", "mem60", "mem75", "full")):
        yield pipeline("wave", wave, ranks, 4 * ranks, memory, chunks=2)
    for ranks, memory in product((8, 16), ("half", "mem60", "mem75")):
        yield pipeline("wave", wave, ranks, 4 * ranks, memory, "w50", 2, uneven=30)
    for ranks, memory in product((4, 8), ("mem75", "full")):
        yield pipeline("wave", wave, ranks, 4 * ranks, memory, "w50", 2, split=False)
        yield pipeline("wave", wave, ranks, 2 * ranks, memory, "w50", 4)


def interleaves() -> Iterator[Placed]:
    """Chains placed round robin, several stages per rank."""
    sizes = ((4, 2, 16), (4, 3, 16), (4, 4, 16), (8, 2, 32), (8, 3, 24), (8, 4, 32), (16, 2, 64), (16, 4, 128))
    for (ranks, chunks, microbatches), memory in product(sizes, ("mem75", "full")):
        if (chunks, microbatches, memory) != (4, 128, "full"):
            yield pipeline("interleaved", interleaved, ranks, microbatches, memory, "w50", chunks)
    for ranks, chunks, microbatches in ((4, 2, 16), (8, 2, 32), (8, 4, 32), (16, 2, 64)):
        yield pipeline("interleaved", interleaved, ranks, microbatches, "full", "w100", chunks, split=False)
    for ranks, chunks, microbatches, memory in ((8, 2, 32, "mem75"), (4, 3, 16, "full"), (16, 4, 128, "mem75")):
        yield pipeline("interleaved", interleaved, ranks, microbatches, memory, "w100", chunks, uneven=30)


def both_ways() -> Iterator[Placed]:
    """Two chains with the same weights in opposite directions."""
    for ranks, memory in product((4, 8, 16), ("mem75", "full")):
        yield pipeline("bidirectional", bidirectional, ranks, 4 * ranks, memory, "w50", split=False)
    for ranks, memory in product((4, 8), ("mem75", "full")):
        yield pipeline("bidirectional", bidirectional, ranks, 4 * ranks, memory, "w63")
    yield pipeline("bidirectional", bidirectional, 4, 16, "half", split=False)
    yield pipeline("bidirectional", bidirectional, 8, 32, "full", split=False, uneven=15)


def graphs() -> Iterator[Placed]:
    """Stages that form a DAG other than a chain."""
    for towers, length, trunk, memory in ((2, 2, 2, 6), (2, 3, 2, 5), (3, 2, 1, 6), (2, 4, 4, 10), (3, 3, 3, 8)):
        edges, last = [], towers * length
        for tower in range(towers):
            first = tower * length
            edges += [(s, s + 1) for s in range(first, first + length - 1)] + [(first + length - 1, last)]
        edges += [(s, s + 1) for s in range(last, last + trunk - 1)]
        yield graph(f"towers{towers}", last + trunk, edges, memory, 16, seed=towers + length)
    for ranks, memory in ((4, 5), (6, 7), (8, 10), (8, 6)):
        skips = [(s, ranks - 1 - s) for s in range(ranks // 2 - 1)]
        yield graph("unet", ranks, [(s, s + 1) for s in range(ranks - 1)] + skips, memory, 2 * ranks, seed=ranks)
    for half, memory in ((2, 5), (3, 7), (4, 9), (4, 6)):
        across = [(half - 1, s) for s in range(half, 2 * half)]
        chained = [(s, s + 1) for s in range(2 * half - 1) if s != half - 1]
        yield graph("crossattention", 2 * half, chained + across, memory, 4 * half, seed=half)
    for heads, trunk in ((2, 3), (3, 3), (4, 4)):
        edges = [(s, s + 1) for s in range(trunk - 1)] + [(trunk - 1, trunk + head) for head in range(heads)]
        yield graph(f"heads{heads}", trunk + heads, edges, trunk + 1, 16, seed=heads)
    for seed, ranks in ((1, 5), (2, 6), (3, 8), (4, 10)):
        chooser = Random(seed)
        edges = [(chooser.randrange(max(0, s - 3), s), s) for s in range(1, ranks)]
        edges += [
            edge for edge in ((s, s + 2) for s in range(ranks - 2)) if chooser.random() < 0.4 and edge not in edges
        ]
        yield graph(f"random{seed}", ranks, edges, ranks // 2 + 2, 16, seed)


def graph(what: str, ranks: int, edges: Sequence[tuple[int, int]], memory: int, microbatches: int, seed: int) -> Placed:
    """A DAG of uneven stages, one per rank, each with room for `memory` micro-batches."""
    chooser = Random(seed)
    forward = [chooser.randrange(700, 1300) for _ in range(ranks)]
    split = seed % 2 == 0
    parts = ([f for f in forward], [f // 2 for f in forward]) if split else ([2 * f for f in forward],)
    costs = Costs(forward, *parts, activation_bytes=2, edges=edges)  # type: ignore[arg-type]
    name = f"dag-{what}-{ranks}x{microbatches}-{'split' if split else 'whole'}-limit{2 * memory}"
    return name, place(costs, Cluster.uniform(ranks, 2 * memory, latency_us=20)), microbatches


def transfers() -> Iterator[Placed]:
    """What transfers hold on both sides counts: sent bytes until they have left, received ones until they are read."""
    sizes = ((2, 4), (2, 8), (3, 4), (3, 8), (4, 4), (4, 8), (4, 16), (8, 16))
    for (ranks, microbatches), (room, rate) in product(sizes, ((1, 1), (2, 4))):
        costs = Costs.uniform(ranks, 100, 100, 80, activation_bytes=30, boundary_bytes=20)
        name = f"transfers-chain-{ranks}x{microbatches}-split-room{room}-rate{rate}"
        yield name, tight(place, costs, ranks, Link(2, rate), 40 * room), microbatches
    for ranks, microbatches, put in product((2, 4), (6, 12), (wave, interleaved)):
        if (ranks, microbatches) != (4, 6):
            costs = Costs.uniform(2 * ranks, 60, 120, activation_bytes=20, boundary_bytes=16, gradient_bytes=24)
            name = f"transfers-{put.__name__}-{ranks}x2x{microbatches}-whole"
            yield name, tight(put, costs, ranks, Link(5, 2), 30 * ranks), microbatches


def tight(put: Place, costs: Costs, ranks: int, link: Link, room: int) -> Placement:
    """Each rank has room for what one micro-batch needs at least, and `room` bytes more."""
    needs = least_memory(Problem(put(costs, Cluster.uniform(ranks)), 1))
    return put(costs, Cluster(tuple(need.num_bytes + room for need in needs), link))


def mixtures() -> Iterator[Placed]:
    """Recomputation, step ends, tensor-parallel stages, ranks and links that differ, as in real clusters."""
    for ranks, share in ((4, 1), (8, 2), (16, 4)):
        recompute = tuple(900 if s % share == 0 else None for s in range(ranks))
        costs = Costs.uniform(ranks, 1000, 2000, activation_bytes=10, recompute_us=recompute, checkpoint_bytes=2)
        yield f"recompute-{ranks}x{2 * ranks}", place(costs, Cluster.uniform(ranks, 6 * ranks)), 2 * ranks
    for ranks, reduce_us in ((4, 3000), (8, 6000), (16, 9000)):
        costs, _ = costs_of(ranks, "w50", 1, True, 15, ranks)
        ended = replace(costs, reduce_us=(reduce_us,) * ranks, optimizer_us=(1500,) * ranks, static_bytes=(40,) * ranks)
        yield f"stepend-chain-{ranks}x{2 * ranks}", place(ended, Cluster.uniform(ranks, 40 + 2 * ranks)), 2 * ranks
    for pairs in (2, 4):
        costs = Costs.uniform(pairs + 1, 1000, 1900, activation_bytes=3, boundary_bytes=400)
        where = [*((2 * s, 2 * s + 1) for s in range(pairs)), range(2 * pairs)]
        yield (
            f"tensorparallel-{2 * pairs}x16",
            place(costs, Cluster.uniform(2 * pairs, 3 * pairs + 850, 10, 100), where),
            16,
        )
    for ranks in (4, 8):
        costs, _ = costs_of(ranks, "w63", 1, True, 30, ranks)
        slow = tuple(
            (a, b, Link(4000, None)) for s in range(1, ranks, 2) if s + 1 < ranks for a, b in ((s, s + 1), (s + 1, s))
        )
        limits = tuple(ranks + 2 * (ranks - s) for s in range(ranks))
        yield f"twolinks-chain-{ranks}x{3 * ranks}", place(costs, Cluster(limits, Link(200), slow)), 3 * ranks


def large() -> Iterator[Placed]:
    """Tens to hundreds of thousands of ops."""
    yield pipeline("chain", place, 64, 128, "full", "w63")
    yield pipeline("chain", place, 64, 256, "full", uneven=15)
    yield pipeline("chain", place, 64, 512, "mem75", uneven=30)
    yield pipeline("chain", place, 128, 256, "full", uneven=15)
    yield pipeline("chain", place, 128, 1024, "mem75", uneven=30)


def main() -> None:
    """Write what is missing or has changed."""
    wanted = problems()
    for path in FOLDER.glob("*.json"):
        if path.stem not in {one.name for one in wanted}:
            sys.exit(f"{path} is no problem of make.py; remove it")
    for one in wanted:
        path = FOLDER / f"{one.name}.json"
        if path.exists() and Reference.read(path).is_of(one.placement, one.num_microbatches):
            continue
        try:
            write(one, path)
        except RotaError as error:
            sys.exit(f"{one.name}: {error}")
        print(path.name, flush=True)


if __name__ == "__main__":
    main()
