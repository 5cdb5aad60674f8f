"""The checker notices each kind of wrong file."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.problem_library import FOLDER, PATHS, check

Fields = dict[str, Any]
SMALL = "v-4x128-limit3"  # a load under a memory limit, with all words of a row but `frees`
AREA, TRANSFERS = "x-4x8-limit2", "transfers-chain-4x8-split-room8-rate4"


def fields_of(name: str) -> Fields:
    loaded: Fields = json.loads((FOLDER / f"{name}.json").read_text())
    return loaded


def verdict(fields: Fields, folder: Path) -> str:
    """What the checker says about a file with these fields; empty if it accepts it."""
    path = folder / f"{fields['name']}.json"
    path.write_text(json.dumps(fields))
    try:
        check.check(path)
    except (check.WrongError, LookupError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def shorter(fields: Fields) -> None:
    fields["makespan_us"] -= 1


def op_missing(fields: Fields) -> None:
    fields["orders"][1] = fields["orders"][1].rpartition(" ")[0]


def op_twice(fields: Fields) -> None:
    words = fields["orders"][1].split()
    fields["orders"][1] = " ".join([*words, words[0]])


def op_elsewhere(fields: Fields) -> None:
    fields["orders"][0], fields["orders"][1] = fields["orders"][1], fields["orders"][0]


def op_unknown(fields: Fields) -> None:
    fields["orders"][0] = fields["orders"][0].replace("0F0", "77F0", 1)


def cycle(fields: Fields) -> None:
    words = fields["orders"][0].split()
    fields["orders"][0] = " ".join(reversed(words))


def less_memory(fields: Fields) -> None:
    fields["cluster"]["limit_bytes"][0] = fields["peak_bytes"][0] - 1


def more_held(fields: Fields) -> None:
    fields["peak_bytes"][0] += 1


def higher_bound(fields: Fields) -> None:
    fields["bound_us"] += 1


def other_name(fields: Fields) -> None:
    fields["tasks"][0][2] += 1  # of the problem, which the plan's time no longer fits


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (shorter, "the plan takes"),
        (op_missing, "rank 1 does not do exactly its ops"),
        (op_twice, "rank 1 does not do exactly its ops"),
        (op_elsewhere, "does not do exactly its ops"),
        (op_unknown, "77F0 is not an op of the problem"),
        (cycle, "wait in a cycle"),
        (less_memory, "the plan exceeds the limits of the ranks [0]"),
        (more_held, "bytes"),
        (higher_bound, "the certificate proves"),
        (other_name, "the plan takes"),
    ],
)
def test_a_tampered_file_is_refused(tamper: Callable[[Fields], None], said: str, tmp_path: Path) -> None:
    fields = fields_of(SMALL)
    assert verdict(fields, tmp_path) == ""
    tamper(fields)
    assert said in verdict(fields, tmp_path)


def test_the_bytes_of_transfers_count(tmp_path: Path) -> None:
    fields = fields_of(TRANSFERS)
    for edge in fields["edges"]:
        edge[2] += bool(edge[2])
    fields["cluster"]["link"][1] = None
    fields["cluster"]["link"][0] += 5  # as long as with a rate of 4 bytes per µs: only memory differs
    assert "the plan holds" in verdict(fields, tmp_path)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("first@0 1F0", None),  # an op of another rank
        ("idle@0", None),  # no op to be idle before
        ("0F0 idle@0:-1/2", None),  # a negative price
        ("0F0 work@0", None),  # no idle time yet
        ("0F5 0F3 idle@0", None),  # backwards
        (None, "0B127 0F0 idle@0"),  # nothing says that 0F0 is so late, seen from the end
        ("0F0", None),  # not an idle time
        ("frees@0 0F0", None),  # 0F0 frees nothing
    ],
)
def test_a_wrong_row_is_refused(before: str | None, after: str | None, tmp_path: Path) -> None:
    fields = fields_of(SMALL)
    proof = fields["certificate"]
    proof["before"], proof["after"] = before or proof["before"], after or proof["after"]
    if before is not None:  # what is proved on one side alone must suffice
        proof["after"] = "first@0 0F0"
    assert verdict(fields, tmp_path) != ""


def test_a_wrong_area_is_refused(tmp_path: Path) -> None:
    fields = fields_of(AREA)
    fields["certificate"] = {"argument": "area", "rank": 1, "held": [["1F", "1B", 1], ["6F", "6B", 1]]}
    fields["bound_us"] = 45
    assert verdict(fields, tmp_path) == ""
    for held in ([["1F", "1B", 2], ["6F", "6B", 1]], [["1F", "1B", 1]], [["1B", "1F", 1], ["6F", "6B", 1]]):
        fields["certificate"]["held"] = held
        assert verdict(fields, tmp_path) != ""
    fields["certificate"] = {"argument": "guess"}
    assert verdict(fields, tmp_path) != ""


def test_what_only_a_solver_says_is_marked() -> None:
    marked = [path for path in PATHS if '"argument": "CP-SAT"' in path.read_text()]
    for path in marked[:5]:
        assert check.check(path).endswith("CP-SAT")


def test_the_script_counts_what_is_right(tmp_path: Path) -> None:
    wrong = fields_of(SMALL)
    wrong["bound_us"] += 1
    (tmp_path / f"{SMALL}.json").write_text(json.dumps(wrong))
    (tmp_path / f"{AREA}.json").write_text((FOLDER / f"{AREA}.json").read_text())
    (tmp_path / "broken.json").write_text("{")
    done = subprocess.run(
        [sys.executable, "-S", "-E", FOLDER / "check.py", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "1 of 3 files are right" in done.stdout
    right = subprocess.run(
        [sys.executable, "-S", "-E", FOLDER / "check.py", tmp_path / f"{AREA}.json"], capture_output=True, text=True
    )
    assert (right.returncode, right.stderr) == (0, "")
