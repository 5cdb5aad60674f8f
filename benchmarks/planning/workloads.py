"""Ten models and machines, their layers' costs by formula: what autoplan gains over the usual plans.

python benchmarks/planning/workloads.py            the table of the README
python benchmarks/planning/workloads.py uniform    some of them

A transformer block of width h on rows of s tokens takes 24 s h² + 4 s² h FLOPs a row forward, twice that backward, half
of it for weights; it keeps 34 s h bytes a row (Korthikanti et al., 2022, with attention that keeps no matrix) and has
12 h² parameters of 16 bytes with gradients and Adam's state (bf16 weights and gradients: 2 + 2 + 12).
A device computes 200 TFLOP/s; each layer costs 100 µs a pass on top, so that small micro-batches are less efficient.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rota import Link, Machine, RotaError, autoplan, check, simulate
from rota.core.layers import LayerCosts
from rota.cutting import uniform
from rota.planning import Answer
from rota.planning.layouts import Candidate, layouts
from rota.planning.request import Choices, Request
from rota.schedules import NAMED

FLOPS_A_US, OVERHEAD_US = 200e6, 100
FAST, SLOW, NODES = Link(5, 300_000), Link(30, 1_000), Link(20, 25_000)
GB = 10**9


@dataclass(frozen=True)
class Layer:
    """A row's forward FLOPs, the bytes that it keeps and sends on; parameters, and whether they are trained."""

    flops: float
    kept: float
    sent: float
    parameters: float
    is_trained: bool = True
    passes_gradient: bool = True


def block(h: int, s: int, times: float = 1.0, **others: Any) -> Layer:
    """A transformer block whose MLP and attention are `times` as large."""
    return Layer(times * (24 * s * h**2 + 4 * s**2 * h), 34 * s * h * times, 2 * s * h, 12 * h**2 * times, **others)


def embedding(h: int, s: int, vocabulary: int) -> Layer:
    return Layer(s * h, 8 * s, 2 * s * h, vocabulary * h)


def head(h: int, s: int, vocabulary: int) -> Layer:
    """With the loss: the logits are kept in four bytes each."""
    return Layer(2 * s * h * vocabulary, 4 * s * vocabulary + 2 * s * h, 0, vocabulary * h)


def costs(layers: list[Layer], rows: int, edges: Iterable[tuple[int, int]] | None = None) -> LayerCosts:
    pairs = [(i, i + 1) for i in range(len(layers) - 1)] if edges is None else sorted(edges)
    forward = [round(OVERHEAD_US + rows * layer.flops / FLOPS_A_US) for layer in layers]
    inputs = [us if layer.passes_gradient else 0 for us, layer in zip(forward, layers, strict=True)]
    weights = [us if layer.is_trained else 0 for us, layer in zip(forward, layers, strict=True)]
    passed = [layer.passes_gradient or layer.is_trained for layer in layers]
    kept = [round(rows * layer.kept) if by else 0 for layer, by in zip(layers, passed, strict=True)]
    trained = [layer.parameters if layer.is_trained else 0 for layer in layers]
    sent = [round(rows * layers[source].sent) for source, _ in pairs]
    back = [size if layers[source].passes_gradient else 0 for size, (source, _) in zip(sent, pairs, strict=True)]
    none = [0] * len(layers)
    peaks = [round(rows * layer.kept / 10) for layer in layers]
    columns: dict[str, list[int]] = {
        "forward_us": forward,
        "backward_us": [i + w for i, w in zip(inputs, weights, strict=True)],
        "input_us": inputs,
        "weight_us": weights,
        "recompute_us": forward,
        "optimizer_us": [round(12 * count / 2e6) for count in trained],
        "kept_bytes": kept,
        "waiting_bytes": [size // 2 for size in kept],
        **{f"{name}_peak_bytes": peaks for name in ("forward", "backward", "input", "weight")},
        "parameter_bytes": [round(2 * layer.parameters) for layer in layers],
        "gradient_bytes": [round(2 * count) for count in trained],
        "buffer_bytes": none,
        "optimizer_bytes": [round(12 * count) for count in trained],
    }
    edge_columns = {"boundary_bytes": sent, "boundary_gradient_bytes": back, "received_bytes": [0] * len(pairs)}
    return LayerCosts(
        rows=rows,
        cuts=tuple(f"cuts[{i}]" for i in range(len(layers) - 1)),
        edges=tuple(pairs),
        **{name: tuple(column) for name, column in (columns | edge_columns).items()},
    )


@dataclass(frozen=True)
class Workload:
    name: str
    layers: list[Layer]
    machine: Machine
    batch_rows: int
    rows: tuple[int, ...] = (1, 2, 4)
    edges: tuple[tuple[int, int], ...] | None = None
    inference: bool = False

    def request(self) -> Request:
        profiles = {rows: costs(self.layers, rows, self.edges) for rows in self.rows}
        return Request(profiles, self.machine, self.batch_rows, Choices(inference=self.inference))


def branches(first: int, second: int) -> tuple[tuple[int, int], ...]:
    """Layer 0, two chains, and a last layer where they meet."""
    a, b = [0, *range(1, first + 1)], [0, *range(first + 1, first + second + 1)]
    last = first + second + 1
    return tuple(zip([*a, *b], [*a[1:], last, *b[1:], last], strict=True))


def workloads() -> list[Workload]:
    h, s = 4096, 4096
    gpt = [embedding(h, s, 50_000), *[block(h, s)] * 24, head(h, s, 50_000)]
    large_ends = [embedding(h, s, 256_000), *[block(h, s)] * 24, head(h, s, 256_000)]
    mixed = [block(h, s, 3.0 if i % 4 == 3 else 0.8) for i in range(24)]
    two = [embedding(h, s, 50_000), *[block(h // 2, s)] * 12, *[block(h, s)] * 8, block(h, s)]
    long = [block(h, 65_536)] * 16
    frozen = [block(h, s, is_trained=False, passes_gradient=False)] * 12 + [block(h, s)] * 12
    unequal = Machine(8, (40 * GB,) * 4 + (30 * GB,) * 4, FAST, slowdowns=(1,) * 4 + (2,) * 4)
    eight = Machine(8, 40 * GB, FAST)
    return [
        Workload("uniform", [block(h, s)] * 32, eight, 64),
        Workload("big embedding and head", large_ends, eight, 64),
        Workload("uneven MoE", mixed, eight, 64),
        Workload("two branches", two, Machine(8, 20 * GB, FAST), 64, edges=branches(12, 8)),
        Workload("long context, tight memory", long, Machine(8, 60 * GB, FAST), 32, rows=(1,)),
        Workload("slow links", gpt, Machine(8, 40 * GB, FAST, 2, SLOW), 64),
        Workload("few micro-batches", gpt, eight, 8, rows=(1,)),
        Workload("frozen first half", frozen, eight, 64),
        Workload("inference", gpt, Machine(8, 12 * GB, FAST, 4, NODES), 64, inference=True),
        Workload("heterogeneous ranks", gpt, unequal, 64),
    ]


def usual(request: Request, names: Iterable[str]) -> int | None:
    """The best step of these schedules on equal layers, on all ranks: any depth, v, rows, all recomputed or nothing."""
    best_us: int | None = None
    families = [NAMED[name] for name in names]
    for rows, layers in request.profiles.items():
        for layout in layouts(request, rows):
            if layout.num_ranks * layout.num_replicas < request.machine.num_ranks or layout.recompute not in (
                "none",
                "all",
            ):
                continue
            boundaries = tuple(uniform(layers.num_layers, layout.num_stages))
            for family in families:
                again = frozenset(layout.recomputed)
                candidate = Candidate(request, layout, boundaries, family.backward == "split", again)
                try:
                    plan = family(candidate.placement, layout.num_microbatches)
                    check(plan)
                except RotaError:  # for another placement, or over the limit
                    continue
                us = simulate(plan).makespan_us
                best_us = us if best_us is None else min(best_us, us)
    return best_us


def row(workload: Workload) -> str:
    request = workload.request()
    began = time.perf_counter()
    answer = autoplan(request.profiles, request.machine, request.batch_rows, request.choices, time_limit_s=60)
    took_s = time.perf_counter() - began
    interleaved = usual(request, ["forward_only"] if request.choices.inference else ["interleaved_1f1b", "1f1b"])
    zero_bubble = None if request.choices.inference else usual(request, ["zb_h1", "zb_v"])
    return " | ".join(
        [
            f"| {workload.name}",
            told(answer),
            f"{answer.best.makespan_us / 1000:,.0f}",
            gain(interleaved, answer),
            "–" if request.choices.inference or workload.edges else gain(zero_bubble, answer),
            f"{took_s:.0f} |",
        ]
    )


def told(answer: Answer) -> str:
    best, layout = answer.best, answer.best.candidate.layout
    v = f", {layout.stages_per_rank} stages per rank" if layout.stages_per_rank > 1 else ""
    again = f", {len(best.candidate.recomputed)} recomputed" if best.candidate.recomputed else ""
    sizes = f"{layout.num_microbatches} × {layout.rows} rows"
    return f"{layout.num_ranks} × {layout.num_replicas}{v}, {sizes}{again}, {best.schedule}"


def gain(us: int | None, answer: Answer) -> str:
    return "does not fit" if us is None else f"{us / answer.best.makespan_us:.2f}"


def main() -> None:
    print(
        "| workload | ranks × replicas, micro-batches, schedule | step, ms | × interleaved 1F1B | × zero bubble | s |"
    )
    print("|---|---|---|---|---|---|")
    for workload in workloads():
        if not sys.argv[1:] or any(name in workload.name for name in sys.argv[1:]):
            print(row(workload), flush=True)


if __name__ == "__main__":
    main()
