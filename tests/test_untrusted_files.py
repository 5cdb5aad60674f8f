"""Small files that ask for much, and what else a stranger may have written. Large ones are in tests/fuzz."""

import gzip
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rota import Cluster, Costs, FormatError, Plan, place
from rota.cli import main
from rota.core import reading
from rota.schedules import gpipe

PLAN = gpipe(place(Costs.uniform(2), Cluster.uniform(2)), 2)
MORE_BYTES = 192 * 1024**2


def changed(**fields: object) -> str:
    return json.dumps({**json.loads(PLAN.to_json()), **fields})


def flood() -> str:
    """Two tasks on 3,000 ranks each, and 3,000 edges between them: some 90 kB for 9 million transfers."""
    down, up = list(range(3000)), list(range(3000, 6000))
    return changed(
        orders=["0F0"] * 3000 + ["1F0"] * 3000,
        num_microbatches=1,
        tasks=[["0F", down, 1, 0, 0], ["1F", up, 1, 0, 0]],
        edges=[["0F", "1F", 1]] * 4000,
        cluster={"limit_bytes": [None] * 6000, "link": [0, None], "links": []},
        static_bytes=[0] * 6000,
    )


SMALL_FILES = {
    "microbatches.json": (changed(num_microbatches=10**9), "rank 0 never does 0F2 and"),
    "most microbatches.json": (changed(num_microbatches=10**15), "rank 0 never does 0F2 and"),
    "flood.json": (flood(), "plan.edges make 12,000,000 transfers; a file may have 10,000,000"),
    "ends.json": (changed(step_ends=[[0, 1, 1]] * 10**5), "step_ends names stage 0 twice"),
    "rank.json": (changed(tasks=[["0F", [10**15], 1, 0, 0]], edges=[]), "the cluster has 2 ranks"),
    "stage.json": (changed(orders=["999999999F0", ""]), "which the placement does not know"),
    "name.json": (changed(orders=["0F0" * 3_000_000]), "is not an op"),
    "field.json": (changed(**{"x" * 10**7: 0}, edges={}), "plan.edges is {}; expected a list"),
    "microbatches.csv": ("0F999999999,0B0\n", "rank 0 never does 0F0 and 1999999997 more"),
    "stage.csv": ("999999999F0,0B0\n", "never runs stage 1, but runs stage 999999999"),
    "nested.json": ("[" * 10**6, "nested too deep"),
    "digits.json": ('{"rota": ' + "9" * 10**6 + "}", "Exceeds the limit (4300 digits)"),
    "infinite.json": ('{"rota": "plan", "num_microbatches": 1e400}', 'it holds the number "1e400"'),
    "nan.json": ('{"rota": "plan", "num_microbatches": NaN}', 'it holds the number "NaN"'),
    "twice.json": ('{"rota": "plan", "orders": [], "orders": 1}', 'an object with two fields "orders"'),
    "half.json": (changed(orders=["\ud800"]), "it has half of a character"),
    "other.json": ('{"traceEvents": []}', 'it has no "rota": "plan"; give what `rota plan -o plan.json`'),
}


def limited(*arguments: str, more_bytes: int = MORE_BYTES) -> subprocess.CompletedProcess[str]:
    """`rota`, with as much memory as it has loaded and a little more, and 20 s of a processor."""
    code = (
        "import resource, sys\nfrom pathlib import Path\nfrom rota.cli import main\n"
        "import rota.interop, rota.drawing\n"
        "pages = int(Path('/proc/self/statm').read_text().split()[0])\n"
        f"most = pages * resource.getpagesize() + {more_bytes}\n"
        "resource.setrlimit(resource.RLIMIT_AS, (most, most))\n"
        "for path in sys.argv[2:]:\n    print(path, main([*sys.argv[1].split(), path]), flush=True)\n"
    )
    cpu = lambda: resource.setrlimit(resource.RLIMIT_CPU, (40, 40))  # noqa: E731
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=220, preexec_fn=cpu, check=False)


def test_small_files_do_not_ask_for_much(tmp_path: Path) -> None:
    for name, (text, _) in SMALL_FILES.items():
        (tmp_path / name).write_bytes(text.encode())
    done = limited("check", *(str(tmp_path / name) for name in SMALL_FILES))
    assert done.stdout.count("\n") == len(SMALL_FILES), done.stderr[-2000:]
    lines = done.stderr.splitlines()
    assert len(lines) == len(SMALL_FILES)
    for line, (name, (_, told)) in zip(lines, SMALL_FILES.items(), strict=True):
        assert name in line or "never does" in line or "know" in line, line
        assert told in line
        assert len(line) < 1000


def test_a_small_file_that_unpacks_to_a_large_one_is_refused_early(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b" " * 1024**2) * 1024)
    assert path.stat().st_size < 2 * 1024**2
    done = limited("import trace", str(path))
    assert "bytes unpacked; profile fewer steps" in done.stderr, done.stderr[-2000:]


def test_a_large_file_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LARGEST_BYTES", 3_000_000)
    with (path := tmp_path / "large.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(FormatError, match=r"cannot read .*large.json: it has more than 3,000,000 bytes; give a"):
        reading.read_text(path)


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    (path := tmp_path / "plan.json").write_text(PLAN.to_json(), encoding="utf-8-sig")
    assert main(["check", str(path)]) == 0
    path.write_bytes(PLAN.to_json().encode("utf-16"))
    with pytest.raises(FormatError, match=r"plan.json: it is not a text file in UTF-8 \(byte 0\)"):
        reading.read_text(path)


@pytest.mark.parametrize("name", ["0F1", " 0F", "0F ", "F", "0X", "+1F", "1_0F", "\u0663F", "1000000000F"])
def test_a_task_has_exactly_its_name(name: str) -> None:
    with pytest.raises(FormatError, match=r"plan.tasks\[0\]\[0\] is .*; expected a stage and one of F B I W R O L"):
        Plan.from_json(changed(tasks=[[name, [0], 1, 0, 0]], edges=[]))


COMMANDS = [
    *("check {}.json", "show {}.csv", "explain {}.json", "compare {}.json plan.json"),
    *("plan 1f1b --microbatches 2 --costs {}.json", "plan 1f1b --microbatches 2 --ranks 2 --links {}.json"),
    *("plan-batch {}.json lengths.json", "autoplan --profile {}.json --ranks 2 --batch 8"),
    *("autoplan {}.py --ranks 2 --batch 8", "autoplan hf:{} --ranks 2 --batch 8", "import trace {}.json.gz"),
    *("import megatron {} --ranks 2 --microbatches 2", "import deepspeed {} --microbatches 2"),
    *("import torchtitan {}.json", "run {}.json train.py", "run plan.json {}.py"),
]


@pytest.mark.parametrize(
    ("command", "make", "kind"),
    [
        *((command, os.mkfifo, "a pipe") for command in COMMANDS),
        ("check {}.json", os.mkdir, "a folder"),
        ("check {}.json", lambda path: os.symlink("/dev/zero", path), "a device"),
    ],
)
def test_what_is_no_file_is_refused_unopened(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    make: Callable[[str], None],
    kind: str,
) -> None:
    """A pipe that nobody writes to would be waited for, and a device may never end."""
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(PLAN.to_json())
    Path("train.py").touch()
    words = [word.format("given") for word in command.split()]
    name = next(word for word in words if "given" in word).removeprefix("hf:")
    make(name)
    assert main(words) == 2
    assert f"{name} is not a regular file but {kind}" in capsys.readouterr().err
