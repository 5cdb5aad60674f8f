"""How near real steps are to the simulated one: 20 random plans with small and large messages, and 32 ranks.

python benchmarks/rehearsal/main.py [--plans 20] [--seconds 140] [--only links | plans | rows]

The plans run on `rota.Pipeline`, with stages whose ops wait, see waiting.py. Links are measured first, with such stages
too, as processes that sleep answer later than those that compute; then plans are made for them, then each plan is run.
All that is done is kept beside this file, in result.json and plans/, and not done again: with --seconds the call begins
no run after that time, and the next call goes on. Remove result.json and plans/ to begin again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from plans import MANY, Case, cases, one_at_a_time, plan_of
from waiting import rehearse

from rota import Cluster, Kind, Link, Op, Plan, compare, simulate
from rota.accounting.comparison import Part
from rota.core.cluster import SharedLink
from rota.profiling.links import SIZES, line_through
from rota.profiling.machine_links import links_of_started

HERE = Path(__file__).parent
RESULT, PLANS = HERE / "result.json", HERE / "plans"
NUM_STEPS, NUM_MESSAGES = 5, 9
#: As docs/running.md recommends: a process keeps the pages of messages that it has freed.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
}
HOST, HOST_RANKS = "host", 4  # what all ranks share, and how many measure it
#: By class of messages: the bar for the median of the plans' errors, and for each of them.
BARS = {"up to 1 MB": (0.03, 0.03), "4 MB": (0.03, 0.10), "16 MB": (0.15, None), MANY: (0.03, 0.03)}


class Results:
    """What is in result.json: links by number of ranks, rows by case."""

    def __init__(self) -> None:
        found = json.loads(RESULT.read_text()) if RESULT.exists() else {"links": {}, "rows": {}}
        self.links: dict[str, Any] = found["links"]
        self.rows: dict[str, dict[str, Any]] = found["rows"]

    def keep(self) -> None:
        """Write the file."""
        RESULT.write_text(json.dumps({"links": self.links, "rows": self.rows}, indent=1) + "\n")

    def cluster(self, num_ranks: int) -> Cluster:
        """The ranks with their links, measured now if they have not been."""
        if str(num_ranks) not in self.links:
            self.links[str(num_ranks)] = Cluster((None,) * num_ranks, measured_link(num_ranks)).to_json()
            self.keep()
        if HOST not in self.links:
            self.links[HOST] = links_of_started(HOST_RANKS, "cpu", report=print).cluster.shared[0].bytes_per_us
            self.keep()
        cluster, ranks = Cluster.from_json(self.links[str(num_ranks)]), tuple(range(num_ranks))
        return replace(cluster, shared=(SharedLink(HOST, self.links[HOST], ranks, ranks),))


def measured_link(num_ranks: int) -> Link:
    """The link between processes that sleep."""
    plan = one_at_a_time(num_ranks)
    times: dict[int, list[int]] = {size: [] for size in SIZES}
    for timeline in rehearse(plan, NUM_MESSAGES):
        starts = {span.work: span.start_us for span in timeline.op_spans()}
        for stage, num_bytes in enumerate(edge.num_bytes for edge in plan.placement.edges[: plan.num_stages - 1]):
            for kind, source, target in ((Kind.F, stage, stage + 1), (Kind.B, stage + 1, stage)):
                op = Op(source, kind, 0)
                times[num_bytes].append(starts[Op(target, kind, 0)] - starts[op] - plan.duration_us(op))
    latency_us, per_byte = line_through([(size, median(of_size)) for size, of_size in times.items()])
    return Link(round(latency_us), max(round(1 / per_byte), 1) if per_byte else None)


def made(case: Case, results: Results) -> tuple[str, Plan]:
    """A case's name and plan, which is made once."""
    path = PLANS / f"{case.key}.json"
    if not path.exists():
        name, plan = plan_of(case, results.cluster(case.num_ranks))
        PLANS.mkdir(exist_ok=True)
        path.write_text(json.dumps({"name": name, "plan": plan.to_json()}))
    found = json.loads(path.read_text())
    return found["name"], Plan.from_json(found["plan"])


def row_of(case: Case, results: Results) -> dict[str, Any]:
    """Run a case."""
    name, plan = made(case, results)
    load = os.getloadavg()[0]
    timelines = sorted(rehearse(plan, NUM_STEPS), key=lambda timeline: timeline.makespan_us)
    return {
        "plan": name,
        "simulated_us": simulate(plan).makespan_us,
        "steps_us": [timeline.makespan_us for timeline in timelines],
        "later_arrivals_us": compare(plan, timelines[NUM_STEPS // 2]).parts_us[Part.ARRIVALS],
        "load": round(load, 1),
    }


def off(row: dict[str, Any]) -> float:
    """By how much the median step took longer than simulated."""
    return float(median(row["steps_us"]) / row["simulated_us"] - 1)


def spread(row: dict[str, Any]) -> float:
    """The longest step minus the shortest one, as a part of the median."""
    return float((max(row["steps_us"]) - min(row["steps_us"])) / median(row["steps_us"]))


def tell(row: dict[str, Any]) -> None:
    steps = " ".join(f"{us / row['simulated_us'] - 1:+.1%}" for us in row["steps_us"])
    arrivals = row["later_arrivals_us"] / row["simulated_us"]
    print(
        f"  {row['plan']:<34}{row['simulated_us'] / 1000:>9.1f} ms{off(row):>+8.1%}   {steps:<40}{arrivals:>+8.1%}",
        flush=True,
    )


def summarize(rows: dict[str, dict[str, Any]]) -> None:
    for sizes, (middle, each) in BARS.items():
        of_class = [row for key, row in rows.items() if key.startswith(f"{sizes},")]
        if not of_class:
            continue
        errors = sorted((abs(off(row)) for row in of_class), reverse=True)
        bar = f"bars {middle:.0%}" + (f" and {each:.0%}" if each is not None else "")
        within = f"; {sum(error <= each for error in errors)} within {each:.0%}" if each is not None else ""
        apart = [*map(spread, of_class)]
        print(
            f"{sizes}: {len(errors)} plans; median {median(errors):.1%}, worst {errors[0]:.1%} ({bar}){within}; "
            f"steps of one plan {median(apart):.1%} apart (median), {max(apart):.1%} at most"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after this long")
    parser.add_argument("--only", choices=("links", "plans", "rows"))
    given = parser.parse_args()
    os.environ |= ENVIRONMENT
    end_s = time.monotonic() + given.seconds
    results, every = Results(), cases(given.plans)
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores"
    )
    for num_ranks in sorted({case.num_ranks for case in every}):
        if given.only in (None, "links") or str(num_ranks) in results.links:
            cluster = results.cluster(num_ranks)
            rates = f"{cluster.link.bytes_per_us} MB/s alone, {cluster.shared[0].bytes_per_us} together"
            print(f"  {num_ranks} ranks: {cluster.link.latency_us} µs, {rates}", flush=True)
    for case in every if given.only in (None, "plans") else ():
        made(case, results)
    for case in every if given.only in (None, "rows") else ():
        if case.key not in results.rows and time.monotonic() < end_s:
            results.rows[case.key] = row_of(case, results)
            results.keep()
            tell(results.rows[case.key])
    missing = sum(case.key not in results.rows for case in every)
    summarize(results.rows)
    if missing:
        print(f"{missing} of {len(every)} are left for the next call")


if __name__ == "__main__":
    main()
