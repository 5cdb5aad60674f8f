"""`make bench`: runs the benchmarks, and writes docs/results.md: each claim, its command, its environment, its result.

python benchmarks/results.py [NAME …]      all of them, or those named: the page keeps what it has of the others
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "results.md"
NAMES = sorted(main.parent.name for main in HERE.glob("*/main.py"))
HEAD = """# Results

Every claim about speed, with the command that checks it and its output. `make bench` writes this page again;
`python benchmarks/results.py NAME` updates one part of it. The README of each folder explains the figures, says which
claims are not met, and has results that this page does not have yet.
"""
_LIBRARIES = ("torch", "ortools", "numba", "matplotlib")


def claim_of(name: str) -> str:
    """The paragraphs of the benchmark's README from its claim up to its command."""
    text = (HERE / name / "README.md").read_text()
    found = re.search(r"^\*\*Claims?\.?\*\*.*?(?=^\*\*Command)", text, re.DOTALL | re.MULTILINE)
    if found is None:
        raise SystemExit(f"benchmarks/{name}/README.md has no **Claim.** before its **Command.**")
    return found[0].strip()


def environment() -> str:
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _LIBRARIES)
    return (
        f"Python {platform.python_version()}, {versions}; {model[1] if model else platform.machine()}, "
        f"{os.cpu_count()} cores; load {os.getloadavg()[0]:.1f} before it"
    )


def result_of(name: str) -> tuple[str, float]:
    """What the benchmark prints, shown as it comes, and the seconds that it takes."""
    began_s = time.monotonic()
    lines = []
    command = [sys.executable, "-u", str(HERE / name / "main.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    if process.returncode:
        raise SystemExit(f"benchmarks/{name}/main.py ended with {process.returncode}; {PAGE.name} stays as it was")
    return "\n".join(lines).strip(), time.monotonic() - began_s


def section(name: str) -> str:
    around = f"{datetime.date.today()}; {environment()}"
    result, seconds = result_of(name)
    shown = result if result.startswith("|") else f"```\n{result}\n```"
    return (
        f"## {name}\n\n{claim_of(name)}\n\n**Command.** `python benchmarks/{name}/main.py` ({seconds:,.0f} s); "
        f"[more](../benchmarks/{name}/README.md)\n\n**Environment.** {around}.\n\n**Result.**\n\n{shown}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default: all")
    names = parser.parse_args().names or NAMES
    if unknown := sorted({*names} - {*NAMES}):
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(NAMES)}")
    there = PAGE.read_text() if PAGE.exists() else ""
    parts = dict(re.findall(r"^(## (?:[\w-]+)\n)(.*?)(?=^## [\w-]+\n|\Z)", there, re.DOTALL | re.MULTILINE))
    sections = {head[3:].strip(): f"{head}{body.rstrip()}\n" for head, body in parts.items()}
    for name in names:
        print(f"== {name}", flush=True)
        sections[name] = section(name)
        whole = [HEAD, *(sections[known] for known in NAMES if known in sections)]
        PAGE.write_text("\n".join(whole))  # after each: an interrupted run loses nothing
    print(f"Wrote {PAGE.relative_to(HERE.parent)}.")


if __name__ == "__main__":
    main()
