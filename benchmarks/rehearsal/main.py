"""How near rehearsed steps are to the simulated one: 20 random plans with small and large messages, and 32 ranks.

python benchmarks/rehearsal/main.py [--plans 20] [--seconds 140] [--only links | plans | rows]

Links are measured first (`rota profile links --rehearsal`), then plans are made for them, then each plan is rehearsed.
All that is done is kept beside this file, in result.json and plans/, and not done again: with --seconds the call stops
before a rehearsal that would begin later, and the next call goes on. Remove result.json and plans/ to begin again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from plans import MANY, Case, cases, plan_of

from rota import Cluster, Plan
from rota.planning.rehearsal import rehearse
from rota.profiling.host_links import REPEATS
from rota.profiling.link_processes import links_of_started

HERE = Path(__file__).parent
RESULT, PLANS = HERE / "result.json", HERE / "plans"
NUM_STEPS = 5
MOST_SPREAD = 8.0  # of links: how far a median may be above the fastest quarter
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
            repeats = max(64 // num_ranks, 3)  # of each neighbour's messages
            found = links_of_started(num_ranks, "cpu", min(repeats, REPEATS), MOST_SPREAD, print)
            self.links[str(num_ranks)] = found.rehearsal.to_json()
            self.keep()
        return Cluster.from_json(self.links[str(num_ranks)])


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
    """Rehearse a case."""
    name, plan = made(case, results)
    load = os.getloadavg()[0]
    rehearsal = rehearse(plan, num_steps=NUM_STEPS, device="cpu")
    planned, comparison = rehearsal.planned, rehearsal.comparison
    return {
        "plan": name,
        "simulated_us": planned.makespan_us,
        "steps_us": rehearsal.makespans_us,
        "later_arrivals_us": comparison.later_arrivals_us,
        "late_us": round(sum(of.late_us for of in rehearsal.overheads) / sum(map(len, planned.plan.orders))),
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
        f"  {row['plan']:<34}{row['simulated_us'] / 1000:>9.1f} ms{off(row):>+8.1%}   {steps:<40}"
        f"{arrivals:>+8.1%}{row['late_us']:>6} µs",
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
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no rehearsal after this long")
    parser.add_argument("--only", choices=("links", "plans", "rows"))
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
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
