"""`make fuzz`: a hundred thousand wrong plans, 28,000 other files and 130,000 wrong checkpoints, over all processors.

python -m fuzz [--targets plans csv …] [--cases N] [--seed S] [--case K]

A case that ends badly is written to fuzz-failures/ and told with its seed and number; --case runs that one alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from fuzz.cases import CHECKPOINTS, NAMES, NUM_FOLDERS, TARGETS, failure, keep

_CHUNK = 250
_MORE_BYTES = 1024**3  # that a worker may take beyond what it begins with
_FAILURES = Path("fuzz-failures")

Ended = tuple[Counter[str], list[tuple[int, str]]]


def _limit_memory() -> None:
    """An allocation beyond fails as MemoryError, which no case may raise. What is imported is there already."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + _MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _run_chunk(target: str, seed: int, numbers: range) -> Ended:
    outcomes: Counter[str] = Counter()
    failures = []
    with TemporaryDirectory() as folder:
        for number in numbers:
            outcome, told = failure(target, seed, number, Path(folder))
            outcomes[outcome] += 1
            if told is not None:
                failures.append((number, told))
    return outcomes, failures


def _fuzz(target: str, seed: int, num_cases: int, pool: ProcessPoolExecutor) -> int:
    """Returns the number of failures."""
    began, outcomes, num_failures = time.monotonic(), Counter[str](), 0
    chunks = [range(at, min(at + _CHUNK, num_cases)) for at in range(0, num_cases, _CHUNK)]
    for done in as_completed([pool.submit(partial(_run_chunk, target, seed), chunk) for chunk in chunks]):
        of_chunk, failures = done.result()
        outcomes += of_chunk
        for number, told in failures:
            num_failures += 1
            _keep(target, seed, number, told)
        if sys.stderr.isatty():
            print(f"\r{target}: {outcomes.total():,} of {num_cases:,}", end="", file=sys.stderr, flush=True)
    told = ", ".join(f"{name} {count:,}" for name, count in sorted(outcomes.items()))
    print(f"\r{target}: {num_cases:,} files in {time.monotonic() - began:.0f} s: {told}", flush=True)
    return num_failures


def _keep(target: str, seed: int, number: int, told: str) -> None:
    _FAILURES.mkdir(exist_ok=True)
    path = keep(target, seed, number, _FAILURES)
    again = f"python -m fuzz --targets {target} --seed {seed} --case {number}"
    print(f"\n{told}\nIt is {path}; again by: {again}\n", flush=True)


def _num_cases(target: str) -> int:
    return NUM_FOLDERS if target == CHECKPOINTS else TARGETS[target].num_cases


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--targets", nargs="+", choices=NAMES, default=[*NAMES])
    parser.add_argument("--cases", type=int, help="of each target (default: 258,000 in all)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="this one alone, of each target")
    given = parser.parse_args()
    if given.case is not None:
        with TemporaryDirectory() as folder:
            ends = [failure(target, given.seed, given.case, Path(folder)) for target in given.targets]
        print(*(told or outcome for outcome, told in ends), sep="\n")
        return int(any(told for _, told in ends))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context, initializer=_limit_memory) as pool:
        bad = [_fuzz(name, given.seed, given.cases or _num_cases(name), pool) for name in given.targets]
    return int(any(bad))
