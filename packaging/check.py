"""Builds wheel and sdist, installs the wheel with all extras into an empty environment, and uses it there.

python packaging/check.py                                 with this Python and the torch of constraints.txt
python packaging/check.py --python python3.13 --torch 2.10.0 --tests
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TYPED = """import rota

plan: rota.Plan = rota.schedules.one_f_one_b(rota.place(rota.Costs.uniform(2), rota.Cluster.uniform(2)), 4)
reveal_type(rota.simulate(plan).makespan_us)
"""
#: What a new user tries first, each in an empty folder.
USES = (
    "rota --version",
    "rota plan 1f1b --ranks 4 --microbatches 8 --forward-us 100 --backward-us 200 -o plan.json",
    "rota show plan.json -o plan.png",
    "rota show plan.json -o plan.html",
    "rota plan search --ranks 4 --microbatches 8 --time-limit 5",
    "rota demo --steps 10",
)


def run(*command: object, cwd: Path = ROOT) -> str:
    """What it prints; shown as well where it fails."""
    print(f"$ {' '.join(map(str, command))}", flush=True)
    done = subprocess.run([*map(str, command)], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stdout}\npackaging/check.py: that ended with {done.returncode}")
    return done.stdout


def build(folder: Path) -> Path:
    """The wheel; one made from the sdist holds the same files."""
    run(sys.executable, "-m", "hatchling", "build", "-d", folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    run("tar", "-xzf", sdist, "-C", folder)
    again = folder / "again"
    run(
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-t",
        "wheel",
        "-d",
        again,
        cwd=folder / sdist.name[: -len(".tar.gz")],
    )
    names = [sorted(zipfile.ZipFile(path).namelist()) for path in (wheel, *again.glob("*.whl"))]
    if names[0] != names[1] or "rota/py.typed" not in names[0]:
        raise SystemExit(f"packaging/check.py: wheel and sdist differ, or py.typed is missing: {names}")
    return wheel


def constraints(folder: Path, torch: str | None) -> Path:
    """The pinned versions; with another torch, what torch itself needs is left to it."""
    if torch is None:
        return ROOT / "constraints.txt"
    needs = ("torch==", "triton==", "sympy==", "networkx==", "setuptools==", "mpmath==")
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith(needs)]
    file = folder / "constraints.txt"
    file.write_text("\n".join([*lines, f"torch=={torch}", ""]))
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="the Python to try it on (default: this one)")
    parser.add_argument("--torch", help="the torch to try it with (default: that of constraints.txt)")
    parser.add_argument("--tests", action="store_true", help="run the tests there too, all but the longest")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rota-package-") as name:
        folder = Path(name)
        wheel = build(folder / "dist")
        run(given.python, "-m", "venv", folder / "venv")
        python, pins = folder / "venv/bin/python", constraints(folder, given.torch)
        run(python, "-m", "pip", "install", "-qq", "-c", pins, "pip")
        run(python, "-m", "pip", "install", "-qq", "-c", pins, f"rota[all] @ file://{wheel}", "mypy")
        print(run(python, "-c", "import sys, torch, rota; print(sys.version, torch.__version__, rota.__file__)"))
        empty = folder / "empty"
        empty.mkdir()
        for use in USES:
            program, *words = use.split()
            print(run(folder / "venv/bin" / program, *words, cwd=empty)[-400:])
        (empty / "typed.py").write_text(TYPED)
        told = run(python, "-m", "mypy", "--strict", "typed.py", cwd=empty)
        if 'Revealed type is "int"' not in told and 'Revealed type is "builtins.int"' not in told:
            raise SystemExit(f"packaging/check.py: mypy does not see the types: {told}")
        if given.tests:
            run(python, "-m", "pip", "install", "-qq", "-c", pins, "--group", f"{ROOT}/pyproject.toml:dev")
            few = (
                "tests/runtime/test_training.py",
                "tests/runtime/gradients/test_split_backward_training.py",
                "tests/runtime/checkpoints/test_checkpoints.py",
            )
            print(
                run(
                    python,
                    "-m",
                    "pytest",
                    "-q",
                    "-n",
                    "2",
                    "-m",
                    "not dist",
                    "--ignore",
                    "tests/docs/test_code_blocks.py",
                )[-600:]
            )
            print(run(python, "-m", "pytest", "-q", *few)[-600:])
    print("packaging/check.py: all is well")


if __name__ == "__main__":
    main()
