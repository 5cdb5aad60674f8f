"""The README's example, compared with one process and with plain 1F1B on as many layers in each stage.

python benchmarks/readme/main.py [--rounds 5]

model.py, train.py and the commands are those of README.md. After them, runs of train.py with the plan, with 1F1B and in
one process take turns, each in new processes. The last two have several numbers of micro-batches; the fastest counts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles

README = Path(__file__).parents[2] / "README.md"
NUM_WARM_UP = 10  # first steps of each run, which are left out
PLANS = {
    "plain 1F1B, 4 micro-batches": "plan 1f1b --ranks 2 --microbatches 4",
    "plain 1F1B, 8 micro-batches": "plan 1f1b --ranks 2 --microbatches 8",
    "one process, 1 micro-batch": "plan 1f1b --ranks 1 --microbatches 1",
    "one process, 4 micro-batches": "plan 1f1b --ranks 1 --microbatches 4",
}
CHANGES = {  # of train.py, so that it writes down when each step began and ended
    "import torch\n": "import json\nimport time\n\nimport torch\n",
    "    for step in ": "    steps_s = []\n    for step in ",
    "        loss = pipeline.step(": "        began_s = time.perf_counter()\n        loss = pipeline.step(",
    "        if pipeline.rank == 0 and": (
        "        steps_s.append(time.perf_counter() - began_s)\n"
        '        if pipeline.rank == 0:\n            open("steps.json", "w").write(json.dumps(steps_s))\n'
        "        if pipeline.rank == 0 and"
    ),
}


def timed(train: str) -> str:
    for old, new in CHANGES.items():
        if train.count(old) != 1:
            raise SystemExit(
                f"README.md: train.py has {old!r} {train.count(old)} times, and this benchmark needs it once"
            )
        train = train.replace(old, new)
    return train


def rota(folder: Path, command: str) -> str:
    """What `rota` prints with these arguments."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # a core per rank, also for one process
    words = [sys.executable, "-m", "rota", *command.split()]
    return subprocess.run(words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def steps_ms(folder: Path, plan: str) -> list[float]:
    """The steps of a run of train.py with this plan, without its first ones."""
    rota(folder, f"run {plan} timed.py")
    return [1000 * step_s for step_s in json.loads((folder / "steps.json").read_text())[NUM_WARM_UP:]]


def compared(folder: Path, num_rounds: int) -> dict[str, list[float]]:
    """Steps in ms of the plan and of all of PLANS; runs take turns."""
    paths = {"the plan": "plan.json"}
    for number, (name, command) in enumerate(PLANS.items()):
        paths[name] = f"{number}.json"
        rota(folder, f"{command} -o {paths[name]}")
    found: dict[str, list[float]] = {name: [] for name in paths}
    for _ in range(num_rounds):
        for name, path in paths.items():
            found[name] += steps_ms(folder, path)
    return found


def report(found: dict[str, list[float]]) -> None:
    medians = {name: median(times) for name, times in found.items()}
    print("\n| steps of | median | quartiles |\n|---|---|---|")
    for name, times in found.items():
        low, _, high = quantiles(times)
        print(f"| {name} | {medians[name]:.0f} ms | {low:.0f} to {high:.0f} ms |")
    print()
    for usual in ("one process", "plain 1F1B"):
        fastest = min((name for name in PLANS if name.startswith(usual)), key=medians.__getitem__)
        print(f"A step of the plan is {medians[fastest] / medians['the plan']:.2f} times as fast as with {fastest}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each plan")
    given = parser.parse_args()
    readme = README.read_text()
    model, train = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in (("model.py", model), ("train.py", train), ("timed.py", timed(train))):
            (folder / file).write_text(text)
        printed = {}
        for command in re.findall(r"^    rota (.*?)(?: +#.*)?$", readme, flags=re.MULTILINE):
            printed[command.split()[0]] = rota(folder, command)
        print(printed["autoplan"].splitlines()[0])
        print(*re.findall(r"^step .*: loss .*$", printed["run"], flags=re.MULTILINE), sep="\n")
        print(*re.findall(r"^(?: +planned +measured| *makespan).*$", printed["compare"], flags=re.MULTILINE), sep="\n")
        report(compared(folder, given.rounds))


if __name__ == "__main__":
    main()
