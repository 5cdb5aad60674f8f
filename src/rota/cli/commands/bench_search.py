"""`rota bench-search`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from fnmatch import fnmatch
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rota.cli import files
from rota.cli.arguments import add_time_limit, number
from rota.cli.parser import Command, Parser
from rota.cli.requirements import InputError, require_search
from rota.errors import PipelineError
from rota.reference import Reference
from rota.units import count_text

if TYPE_CHECKING:
    from rota.search.library import Attempt


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rota bench-search` to its parser."""
    parser.add_argument("problems", nargs="+", help="problem files, or folders of them, such as problems/")
    help_text = "only problems whose names match this pattern, such as 'wave-*-half' (default: all)"
    parser.add_argument("--only", metavar="GLOB", help=help_text)
    parser.add_argument("--open", action="store_true", help="only problems whose best plan is not proven optimal")
    parser.add_argument("--list", action="store_true", help="print what is known, without searching")
    add_time_limit(parser, "search each problem for this many seconds (default: 10)", default=10.0)
    parser.add_argument(
        "--jobs",
        type=number(1),
        metavar="N",
        default=1,
        help="number of problems to search at the same time (default: 1)",
    )
    help_text = "write better plans and bounds into the files, once check.py in the same folder has accepted them"
    parser.add_argument("--update", action="store_true", help=help_text)
    parser.add_argument("--json", action="store_true", help="print one JSON object per problem, and no summary")


def run(arguments: Namespace) -> int:
    """Search every problem, and print what is closed, open and better than known. Returns the exit code."""
    paths = _paths(arguments.problems, arguments.only)
    if arguments.open:
        paths = [path for path in paths if _read(path).state != "closed"]
    if arguments.list:
        _list(paths, arguments.json)
        return 0
    require_search()
    if arguments.update:
        _require_checkers(paths)
    attempts: list[Attempt] = []
    with closing(_searched(paths, arguments.time_limit, arguments.jobs)) as searched:
        for attempt in searched:
            attempts.append(attempt)
            if arguments.update and attempt.best is not attempt.known:
                _update(attempt)
            text = json.dumps(attempt.to_fields()) if arguments.json else _line(attempt, len(attempts), len(paths))
            print(text, flush=True)
    if not arguments.json:
        _summarize(attempts, arguments.update)
    return 0


def _paths(given: list[str], only: str | None) -> list[Path]:
    """The files of the problems, smallest first. Raises InputError if there are none."""
    found = {path for one in map(Path, given) for path in (one.glob("*.json") if one.is_dir() else [one])}
    if wrong := [path for path in found if not path.is_file()]:
        raise InputError(f"{wrong[0]} is neither a file nor a folder; give the folder problems/ of Rota's repository")
    paths = [path for path in found if only is None or fnmatch(path.stem, only)]
    if not paths:
        which = f" whose name matches {only!r}" if only else ""
        raise InputError(f"there is no problem{which} in {', '.join(given)}; problems/names.txt lists their names")
    return sorted(paths, key=lambda path: (path.stat().st_size, path.name))


def _read(path: Path) -> Reference:
    with files.named(str(path)):
        return Reference.read(path)


# --- what is known ----------------------------------------------------------------------------------------------------


def _list(paths: Sequence[Path], as_json: bool) -> None:
    """Print the best plan and bound of each file, and how many are closed."""
    known = []
    for path in paths:
        reference = _read(path)
        known.append(reference)
        print(json.dumps(_known_fields(reference)) if as_json else _known_line(reference), flush=True)
    if not as_json:
        _count(known)


def _known_fields(known: Reference) -> dict[str, object]:
    return {
        "name": known.name,
        "family": known.family,
        "num_ops": known.plan.num_ops,
        "state": known.state,
        "gap": known.gap,
        "makespan_us": known.makespan_us,
        "bound_us": known.bound_us,
        "found_by": known.found_by,
        "argument": known.certificate["argument"],
    }


def _known_line(known: Reference) -> str:
    text = f"{known.name:<46} {known.makespan_us:>12,} µs  bound {known.bound_us:>12,} µs  gap {known.gap:>6.2%}  "
    return text + f"{known.state:<10}  bound by {known.certificate['argument']}"


def _count(known: Sequence[Reference]) -> None:
    """Print how many problems are closed, nearly closed and open, and which are open."""
    states = Counter(one.state for one in known)
    print(", ".join(f"{states[state]} {state}" for state in ("closed", "within 1%", "open")), end="")
    print(f": {(len(known) - states['open']) / max(len(known), 1):.1%} closed or within 1%")
    if still_open := sorted((one for one in known if one.state == "open"), key=lambda one: -one.gap):
        print(f"Open: {' '.join(f'{one.name} ({one.gap:.1%})' for one in still_open)}")


# --- searching --------------------------------------------------------------------------------------------------------


def _searched(paths: list[Path], time_limit_s: float, jobs: int) -> Generator[Attempt, None, None]:
    """The attempts as they end; after Ctrl-C no further search begins."""
    from rota.search.library import search_file

    if jobs == 1:
        for path in paths:
            with files.named(str(path)):
                attempt = search_file(path, time_limit_s)
            yield attempt
            if attempt.was_stopped:
                return
        return
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN))
    try:
        futures = {pool.submit(search_file, path, time_limit_s): path for path in paths}
        for future in as_completed(futures):
            with files.named(str(futures[future])):
                yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _line(attempt: Attempt, done: int, total: int) -> str:
    """One line: the best plan and bound now, and how the search compares with what was known."""
    known_us, found_us, best = attempt.known.makespan_us, attempt.found_us, attempt.best
    text = f"{done:>4}/{total} {best.name:<46} {best.makespan_us:>12,} µs  gap {best.gap:>6.2%}  "
    text += f"{best.state:<10} {attempt.elapsed_s:>6.1f} s"
    if found_us is None:
        return text + "  the search found no plan"
    if attempt.has_better_plan:
        text += f"  better plan: {found_us / known_us - 1:.2%}"
    elif found_us > known_us:
        text += f"  search alone: {found_us / known_us - 1:+.2%}"
    if attempt.has_better_bound:
        text += f"  better bound: {best.bound_us / max(attempt.known.bound_us, 1) - 1:+.2%}"
    return text


def _summarize(attempts: list[Attempt], was_written: bool) -> None:
    _count([attempt.best for attempt in attempts])
    reached = sum(
        attempt.found_us is not None and attempt.found_us <= attempt.known.makespan_us for attempt in attempts
    )
    print(f"The search reached the best known plan for {reached} of {len(attempts)} problems.")
    plans = [attempt.known.name for attempt in attempts if attempt.has_better_plan]
    proofs = [attempt.known.name for attempt in attempts if attempt.has_better_bound]
    for what, names in (("better plan", plans), ("better bound", proofs)):
        if names:
            print(f"{count_text(len(names), what)}: {' '.join(sorted(names))}")
    if (plans or proofs) and not was_written:
        print("These were not saved; --update writes them into the files.")


# --- writing what is better -------------------------------------------------------------------------------------------


def _checker(path: Path) -> Path:
    """The program that verifies a problem's file."""
    return path.with_name("check.py")


def _require_checkers(paths: Iterable[Path]) -> None:
    """Refuse --update where nothing verifies what would be written, before any time is spent. Raises InputError."""
    for path in paths:
        if not _checker(path).is_file():
            raise InputError(
                f"--update: {_checker(path)} is missing, but must accept each file before it is written; copy "
                f"check.py and certificates.py from problems/ of Rota's repository"
            )


def _update(attempt: Attempt) -> None:
    """Write the better plan or bound once it is verified. Raises PipelineError if it is refused."""
    path = Path(attempt.path)
    with TemporaryDirectory(prefix="rota-problem-") as folder:
        better = Path(folder, path.name)
        attempt.best.write(better)
        done = subprocess.run([sys.executable, _checker(path), better], capture_output=True, text=True)
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
        raise PipelineError(f"{path} was not changed: {_checker(path)} refuses what the search found: {said[0]}")
    attempt.best.write(path)


COMMAND = Command(
    "bench-search",
    "run the search on reference problems and compare the results with the best known ones",
    "rota bench-search problems/ --only 'wave-*' --time-limit 30",
    add_arguments,
    run,
)
