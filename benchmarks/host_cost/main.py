"""What the host does per op and message of a step, on a device whose kernels take no time: CPU µs of one thread."""

from __future__ import annotations

import argparse
import cProfile
import gc
import os
import platform
import pstats
import time
from collections.abc import Iterable
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from engines import ENGINES, Engine, plan_for
from null_device import counting, installed

from rota import Plan

NUM_RANKS, RANK = 4, 1
WARM_UP = 20
BASE = "by hand"


def times_us(engines: dict[str, Engine], num_steps: int) -> dict[str, list[float]]:
    """For each engine the CPU time of its steps, in alternation."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    gc.disable()
    for _ in range(WARM_UP + num_steps):
        for name, (step, between) in engines.items():
            before_s = time.thread_time()
            step()
            times[name].append((time.thread_time() - before_s) * 1e6)
            between()
        gc.collect(0)
    gc.enable()
    return {name: each[WARM_UP:] for name, each in times.items()}


def num_actions(plan: Plan) -> int:
    """Ops and messages of the rank."""
    transfers = sum(RANK in (transfer.sender, transfer.receiver) for transfer in plan.transfers)
    return len(plan.orders[RANK]) + transfers


def tell(plan: Plan, title: str, names: Iterable[str], num_steps: int) -> None:
    engines = {name: ENGINES[name](plan, RANK) for name in names}
    times, n = times_us(engines, num_steps), num_actions(plan)
    print(f"{title}, {plan.num_microbatches} micro-batches, {n} actions, {num_steps} alternating steps:")
    for name, us in times.items():
        ratio = median(a / b for a, b in zip(us, times[BASE], strict=True)) if BASE in times else float("nan")
        with counting() as calls:
            engines[name][0]()
        told = ", ".join(f"{what} {count / n:.2f}" for what, count in sorted(calls.items()))
        print(
            f"  {name:25} {median(us) / n:6.2f} µs per action, least {min(us) / n:6.2f}; {ratio:.2f} of by hand; "
            f"{calls.total() / n:.2f} calls per action ({told})",
            flush=True,
        )


def profile(plan: Plan, name: str, num_steps: int) -> None:
    step, between = ENGINES[name](plan, RANK)
    step()
    profiler = cProfile.Profile(time.thread_time)
    for _ in range(num_steps):
        profiler.enable()
        step()
        profiler.disable()
        between()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="*", default=[*ENGINES], choices=[*ENGINES])
    parser.add_argument("--microbatches", nargs="*", type=int, default=[16, 64])
    parser.add_argument("--backward", nargs="*", default=["whole", "split"], choices=("whole", "split"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--profile", action="store_true", help="cProfile of each engine instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}; rank {RANK} of {NUM_RANKS}"
    )
    with installed(RANK, NUM_RANKS):
        for backward in options.backward:
            for num_microbatches in options.microbatches:
                plan = plan_for(NUM_RANKS, num_microbatches, is_split=backward == "split")
                if options.profile:
                    for name in options.engines:
                        profile(plan, name, options.steps)
                else:
                    tell(plan, f"{backward} backward", options.engines, options.steps)
    os._exit(0)  # the watchdogs of the pipelines would wait for other ranks


if __name__ == "__main__":
    main()
