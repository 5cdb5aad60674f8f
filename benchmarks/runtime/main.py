"""What running a plan costs on top of its ops: CPU time per op, makespan against the simulated one, live tensors."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from engines import ENGINES, WIDTH, data, linear_layers, plan_for
from stages import Counting, Waiting
from torch.nn.functional import mse_loss

from rota import Cluster, Costs, Pipeline, Plan, Stages, place, profile, simulate
from rota.schedules import forward_only

WARM_UP = 20
MESSAGE = 16, 64  # rows and width of what the waiting stages exchange: 4 KiB


def on_ranks(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(rank, *args)` on fresh processes that share a Gloo group, one thread each; the results by rank."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(num_ranks) as pool:
        store = f"file://{Path(folder, 'store')}"
        jobs = [(function, store, rank, num_ranks, args) for rank in range(num_ranks)]
        return pool.starmap(_on_rank, jobs, chunksize=1)


def _on_rank(function: Callable[..., Any], store: str, rank: int, num_ranks: int, args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    result = function(rank, *args)
    dist.barrier()
    dist.destroy_process_group()
    return result


# --- CPU time ---------------------------------------------------------------------------------------------------------


def cpu_times(rank: int, num_ranks: int, num_microbatches: int, num_steps: int) -> dict[str, list[tuple[float, float]]]:
    """For each engine and step, in alternation: seconds of the main thread, and of all threads of the process."""
    plan = plan_for(num_ranks, num_microbatches)
    layers = {name: linear_layers(num_ranks) for name in ENGINES}
    engines = {name: make(plan, rank, layers[name]) for name, make in ENGINES.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    expected: list[torch.Tensor] = []
    for _ in range(WARM_UP + num_steps):
        for name, (step, _) in engines.items():
            dist.barrier()
            before = time.thread_time(), time.process_time()
            step()
            times[name].append((time.thread_time() - before[0], time.process_time() - before[1]))
            gradients = [parameter.grad for parameter in layers[name][rank].parameters()]
            expected = expected or [gradient.clone() for gradient in gradients]
            torch.testing.assert_close(gradients, expected)  # they do the same work
            torch._foreach_zero_(gradients)
    for _, close in engines.values():
        close()
    return {name: each[WARM_UP:] for name, each in times.items()}


def tell_cpu_times(num_ranks: int, num_microbatches: int, num_steps: int) -> None:
    by_rank = on_ranks(num_ranks, cpu_times, num_ranks, num_microbatches, num_steps)
    num_ops = 2 * num_microbatches * num_ranks
    print(f"{num_ranks} ranks, {num_microbatches} micro-batches, {num_steps} alternating steps: median CPU µs per op")
    for i, what in enumerate(("main thread", "all threads")):
        per_op = {
            name: [sum(of[i] for of in step) * 1e6 / num_ops for step in zip(*(r[name] for r in by_rank), strict=True)]
            for name in ENGINES
        }
        told = ", ".join(f"{name} {median(us):.1f}" for name, us in per_op.items())
        ratios = " and ".join(
            f"{median(a / b for a, b in zip(per_op['Rota'], per_op[name], strict=True)):.2f} of {name}"
            for name in ("PyTorch", "by hand")
        )
        print(f"  {what}: {told}; Rota takes {ratios}", flush=True)


# --- makespan ---------------------------------------------------------------------------------------------------------


def makespans_us(_: int, plan: Plan, num_steps: int) -> list[int]:
    batch = data(plan.num_microbatches, *MESSAGE)
    with Pipeline(Stages(Waiting() for _ in range(plan.num_ranks)), plan, mse_loss) as pipeline:
        found = []
        for _ in range(num_steps):
            pipeline.step(*batch)
            found.append(pipeline.timeline().makespan_us)
    return found[2:]


def hops_us(rank: int, num_messages: int, num_steps: int) -> list[int]:
    """From the end of rank 0's op to the start of rank 1's, which has been waiting for it alone."""
    plan = forward_only(place(Costs.uniform(2), Cluster.uniform(2)).forward_only(), num_messages)
    batch = data(num_messages, *MESSAGE)[0]
    with Pipeline(Stages([Waiting(), torch.nn.Identity()]), plan, None) as pipeline:
        found = []
        for _ in range(num_steps):
            pipeline.step(batch if rank == 0 else None)
            timeline = pipeline.timeline()
            found += [start - end for start, end in zip(timeline.starts_us[1], timeline.ends_us[0], strict=True)]
    return found[2 * num_messages :]


def as_measured(plan: Plan) -> Plan:
    """The same plan with what its ops and messages cost on this machine."""
    stages = Stages(Waiting() for _ in range(plan.num_ranks))
    costs = profile(stages, *data(1, *MESSAGE), mse_loss)
    latency_us = round(median(on_ranks(2, hops_us, 16, 10)[0]))
    placement = place(costs, Cluster.uniform(plan.num_ranks, latency_us=latency_us))
    return Plan(placement, plan.num_microbatches, plan.orders)


def tell_makespan(num_ranks: int, num_microbatches: int, num_steps: int) -> None:
    plan = plan_for(num_ranks, num_microbatches)
    measured = as_measured(plan)
    found = on_ranks(num_ranks, makespans_us, plan, num_steps + 2)[0]
    print(f"{num_ranks} ranks, {num_microbatches} micro-batches, waits of 5 and 10 ms, messages of 4 KiB:")
    print(f"  makespan {median(found):,.0f} µs (median of {num_steps} steps)")
    for with_what, simulated in (("as given, messages in no time", plan), ("as measured", measured)):
        planned, placement = simulate(simulated).makespan_us, simulated.placement
        of_kind = {kind: [t.duration_us for t in placement.tasks if t.kind == kind] for kind in "FB"}
        told = ", ".join(f"{kind} {min(us):,} to {max(us):,} µs" for kind, us in of_kind.items())
        print(
            f"  costs {with_what} ({told}, link {placement.cluster.link.latency_us} µs): simulated {planned:,} µs, "
            f"{median(found) / planned - 1:+.2%} ({min(found) / planned - 1:+.2%} to {max(found) / planned - 1:+.2%})",
            flush=True,
        )


# --- live tensors -----------------------------------------------------------------------------------------------------


def most_alive(rank: int, num_ranks: int, num_microbatches: int) -> dict[str, dict[str, int]]:
    """For each engine: how many tensors that crossed a boundary of this rank lived at once, by kind."""
    plan, found = plan_for(num_ranks, num_microbatches), {}
    for name in ("Rota", "PyTorch"):
        layers = [Counting(WIDTH) for _ in range(num_ranks)]
        step, close = ENGINES[name](plan, rank, layers)
        step()
        layers[rank].forget()
        step()
        close()
        found[name] = dict(layers[rank].most_alive)
    return found


def tell_most_alive(num_ranks: int) -> None:
    print(f"{num_ranks} ranks, rank 1: most boundary tensors alive at once")
    for num_microbatches in (8, 64):
        found = on_ranks(num_ranks, most_alive, num_ranks, num_microbatches)[1]
        for name, kinds in found.items():
            told = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
            print(f"  {num_microbatches} micro-batches, {name}: {told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("cpu", "makespan", "alive"))
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores"
    )
    if options.only in (None, "cpu"):
        for num_ranks in (2, 4):
            for num_microbatches in (16, 64):
                tell_cpu_times(num_ranks, num_microbatches, options.steps)
    if options.only in (None, "makespan"):
        tell_makespan(4, 16, 20)
    if options.only in (None, "alive"):
        tell_most_alive(4)


if __name__ == "__main__":
    main()
