"""Runs Rota's search on the problems of this folder: python problems/run.py [NAME …] [--update]

    python problems/run.py --list                         what is known
    python problems/run.py 'wave-*' --time-limit 30       search these, and compare with what is known
    python problems/run.py --open --update                write better plans and bounds into the files

A NAME may be a pattern; without one, all problems are searched. Better results are written once check.py accepts them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from reference import Reference, bound_of

from rota.core.errors import FormatError, RotaError, SearchError
from rota.core.simulation import check
from rota.search import find_plan

FOLDER = Path(__file__).parent


class Attempt(NamedTuple):
    """One search on one problem."""

    known: Reference
    best: Reference  #: with the better plan and the better bound of both
    found_us: int | None  #: makespan of the plan that the search found by itself; None if it found none
    was_stopped: bool  #: by Ctrl-C


def search_file(path: Path, time_limit_s: float) -> Attempt:
    """Search the problem in a file. Raises RotaError if the file is wrong, or has a bound above a plan."""
    known = best = Reference.read(path)
    check(known.plan)
    try:
        result = find_plan(known.placement, known.num_microbatches, time_limit_s=time_limit_s)
    except SearchError:
        return Attempt(known, known, None, False)
    found_us = result.makespan_us
    if found_us < known.bound_us:
        raise FormatError(
            f"the bound of {known.bound_us} µs is wrong: the search found a plan that takes {found_us} µs; remove it"
        )
    if found_us < known.makespan_us:
        best = replace(best, plan=result.plan, found_by=result.how)
    bound_us, certificate = bound_of(result)
    if (bound_us, _is_argument(certificate)) > (known.bound_us, _is_argument(known.certificate)):
        best = replace(best, bound_us=bound_us, certificate=certificate)
    return Attempt(known, best, found_us, result.was_stopped)


def _is_argument(certificate: Mapping[str, Any]) -> bool:
    return certificate["argument"] not in ("CP-SAT", "words")


def line(best: Reference) -> str:
    """The best plan and bound, and how the bound is known."""
    text = f"{best.name:<46} {best.makespan_us:>12,} µs  bound {best.bound_us:>12,} µs  gap {best.gap:>6.2%}  "
    return text + f"{best.state:<10} bound by {best.certificate['argument']}"


def comparison(attempt: Attempt) -> str:
    """How a search compares with what was known."""
    known_us, found_us = attempt.known.makespan_us, attempt.found_us
    if found_us is None:
        return "  the search found no plan"
    text = f"  search alone: {found_us / known_us - 1:+.2%}" if found_us > known_us else ""
    if attempt.best.plan is not attempt.known.plan:
        text += f"  better plan: {found_us / known_us - 1:.2%}"
    if attempt.best.bound_us > attempt.known.bound_us:
        text += f"  better bound: {attempt.best.bound_us / max(attempt.known.bound_us, 1) - 1:+.2%}"
    return text


def update(path: Path, best: Reference) -> None:
    """Write what is better once it is verified; otherwise exit."""
    with TemporaryDirectory(prefix="rota-problem-") as folder:
        better = Path(folder, path.name)
        best.write(better)
        done = subprocess.run([sys.executable, FOLDER / "check.py", better], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{path} was not changed: check.py refuses what the search found: {done.stdout}{done.stderr}")
    best.write(path)


def summarize(best: Sequence[Reference]) -> None:
    """Print how many problems are closed, nearly closed and open, and which are open."""
    states = Counter(one.state for one in best)
    print(", ".join(f"{states[state]} {state}" for state in ("closed", "within 1%", "open")))
    if still_open := sorted((one for one in best if one.state == "open"), key=lambda one: -one.gap):
        print(f"Open: {' '.join(f'{one.name} ({one.gap:.1%})' for one in still_open)}")


def main(arguments: Sequence[str], folder: Path = FOLDER) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--open", action="store_true", help="only problems whose best plan is not proven optimal")
    parser.add_argument("--list", action="store_true", help="print what is known, without searching")
    parser.add_argument("--time-limit", type=float, default=10.0, metavar="S", help="seconds per problem (default: 10)")
    parser.add_argument("--update", action="store_true", help="write better plans and bounds into the files")
    given = parser.parse_args(arguments)
    paths = [path for path in folder.glob("*.json") if any(fnmatch(path.stem, name) for name in given.names or "*")]
    if not paths:
        sys.exit(f"there is no problem whose name matches {' or '.join(given.names)}; names.txt lists their names")
    best = []
    for path in sorted(paths, key=lambda path: (path.stat().st_size, path.name)):
        try:
            known = Reference.read(path)
            if given.open and known.state == "closed":
                continue
            attempt = None if given.list else search_file(path, given.time_limit)
        except RotaError as error:
            sys.exit(f"{path}: {error}")
        best.append(known if attempt is None else attempt.best)
        print(line(best[-1]) + ("" if attempt is None else comparison(attempt)), flush=True)
        if attempt is None:
            continue
        if given.update and attempt.best is not attempt.known:
            update(path, attempt.best)
        if attempt.was_stopped:
            break
    summarize(best)


if __name__ == "__main__":
    main(sys.argv[1:])
