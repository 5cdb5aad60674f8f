"""`make bench`: runs the benchmarks, and writes docs/results.md: each claim, its command, its environment, its output.

A benchmark without a recorded output has the results that its README states.

python benchmarks/results.py [NAME …]      all of them, or those named: the page keeps its outputs of the others
python benchmarks/results.py --claims      none: only brings the page up to date with the READMEs
python benchmarks/results.py NAME --part "--only alive"      one of these with arguments, where the whole takes too long

Outputs of parts are kept in benchmarks/NAME/output.json, each with its date and environment. The page has them before
the results of the README, which may be about other parts too.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "results.md"
NAMES = sorted(main.parent.name for main in HERE.glob("*/main.py"))
HEAD = """# Results

Every claim about speed and quality, and the output of the command that checks it. `make bench` runs all benchmarks,
which takes hours, and writes this page. `make bench ONLY="import simulate"` runs some of them and keeps the other
outputs. The README in each folder explains the figures and says which claims are not met. If no output of a benchmark
has been recorded, this page has the results from its README, under "Measured in".
"""
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")  # relative to the README
_LIBRARIES = ("torch", "ortools", "numba", "matplotlib")


def claim_of(name: str) -> str:
    """The paragraphs of the benchmark's README from its claim up to its command."""
    text = (HERE / name / "README.md").read_text()
    found = re.search(r"^\*\*Claims?\.?\*\*.*?(?=^\*\*Command)", text, re.DOTALL | re.MULTILINE)
    if found is None:
        raise SystemExit(f"benchmarks/{name}/README.md has no **Claim.** before its **Command.**")
    return found[0].strip()


def results_of(name: str) -> str:
    """Where the results in the benchmark's README were measured, and all its paragraphs that begin with **Result."""
    text = (HERE / name / "README.md").read_text()
    where = re.search(r"^\*\*Environment\.\*\* (.*?)\n\n", text, re.DOTALL | re.MULTILINE)
    results = re.findall(r"^\*\*Result\b.*?(?=^\*\*[A-Z]|^## |^!\[|\Z)", text, re.DOTALL | re.MULTILINE)
    if where is None or not results:
        raise SystemExit(f"benchmarks/{name}/README.md has no **Environment.** and **Result.**")
    told = "\n\n".join(map(str.strip, results))
    return _LINK.sub(r"\1", f"**Measured in.** {where[1]}\n\n{told}\n")


def environment() -> str:
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _LIBRARIES)
    return (
        f"Python {platform.python_version()}, {versions}; {model[1] if model else platform.machine()}, "
        f"{os.cpu_count()} cores; load {os.getloadavg()[0]:.1f} before it"
    )


def result_of(name: str, *arguments: str) -> tuple[str, float]:
    """What the benchmark prints, shown as it comes, and the seconds that it takes."""
    began_s = time.monotonic()
    lines = []
    command = [sys.executable, "-u", str(HERE / name / "main.py"), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    if process.returncode:
        raise SystemExit(f"benchmarks/{name}/main.py ended with {process.returncode}; {PAGE.name} stays as it was")
    return "\n".join(lines).strip(), time.monotonic() - began_s


def measured(name: str) -> str:
    """Runs the benchmark. Returns its output, and where and how long it ran."""
    where = f"{datetime.date.today()}; {environment()}"
    result, seconds = result_of(name)
    (HERE / name / "output.json").unlink(missing_ok=True)
    shown = result if result.startswith("|") else f"```\n{result}\n```"
    return f"**Environment.** {where}. It took {seconds:,.0f} s.\n\n**Output.**\n\n{shown}\n"


def record_part(name: str, arguments: str, note: str) -> None:
    """Runs the benchmark with these arguments, and keeps what it prints in its output.json."""
    where = environment() + (f"; {note}" if note else "")
    result, seconds = result_of(name, *shlex.split(arguments))
    fields = {"date": str(datetime.date.today()), "environment": where, "seconds": round(seconds)}
    parts = {**_parts(name), arguments: {**fields, "lines": result.split("\n")}}
    (HERE / name / "output.json").write_text(json.dumps(parts, indent=1, ensure_ascii=False) + "\n")


def _parts(name: str) -> dict[str, dict[str, Any]]:
    """What output.json has, by arguments."""
    path = HERE / name / "output.json"
    found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    return found


def recorded_parts(name: str) -> str:
    """The outputs of the parts that were run, each with where and how long it ran; "" if there is none."""
    shown = []
    for arguments, part in _parts(name).items():
        where = f"{part['date']}; {part['environment']}. It took {part['seconds']:,} s."
        lines = "\n".join(part["lines"])
        shown.append(f"**Environment.** {where}\n\n**Output.** `main.py {arguments}`\n\n```\n{lines}\n```\n")
    return "\n".join(shown)


def section(name: str, output: str) -> str:
    """The part of the page about a benchmark, with its README's claim, and without an output its README's results."""
    folder = f"benchmarks/{name}"
    command = (
        f"**Command.** `python {folder}/main.py`; [{folder}](../{folder}/README.md) has the results and explains them."
    )
    parts = recorded_parts(name)
    shown = f"{parts}\n{results_of(name)}" if parts else output or results_of(name)
    return "\n\n".join((f"## {name}", claim_of(name), command, shown)).rstrip() + "\n"


def outputs_on_page() -> dict[str, str]:
    """What the page has of each benchmark, from its environment on."""
    page = PAGE.read_text() if PAGE.exists() else ""
    parts = re.findall(r"^## ([\w-]+)\n(.*?)(?=^## [\w-]+\n|\Z)", page, re.DOTALL | re.MULTILINE)
    found = {name: re.search(r"^\*\*Environment\.\*\*.*", body, re.DOTALL | re.MULTILINE) for name, body in parts}
    return {name: output[0].rstrip() for name, output in found.items() if output is not None}


def page_of(outputs: dict[str, str]) -> str:
    return "\n".join([HEAD, *(section(name, outputs.get(name, "")) for name in NAMES)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--part", metavar="ARGUMENTS", help="run one benchmark with these arguments of its main.py")
    parser.add_argument("--note", default="", help="with --part: what else is to be known about the machine")
    parser.add_argument("--claims", action="store_true", help="run no benchmark: only bring the page up to date")
    arguments = parser.parse_args()
    if unknown := sorted({*arguments.names} - {*NAMES}):
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(NAMES)}")
    outputs = outputs_on_page()
    if arguments.part is not None:
        if len(arguments.names) != 1:
            parser.error("--part is for one benchmark; name it")
        record_part(arguments.names[0], arguments.part, arguments.note)
        arguments.claims = True
    for name in [] if arguments.claims else arguments.names or NAMES:
        print(f"== {name}", flush=True)
        outputs[name] = measured(name)
        PAGE.write_text(page_of(outputs))  # after each: an interrupted run loses nothing
    PAGE.write_text(page_of(outputs))
    print(f"Wrote {PAGE.relative_to(HERE.parent)}.")


if __name__ == "__main__":
    main()
