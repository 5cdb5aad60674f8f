"""A short form of `make fuzz`, and that a campaign sees what it is for."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from fuzz import campaign, cases
from fuzz.cases import TARGETS, failure, mutant, run
from rota import PlanError

SEED, NUM_CASES = 0, 120


@pytest.mark.parametrize("target", TARGETS)
def test_a_wrong_file_is_refused_in_words_or_read_right(target: str, tmp_path: Path) -> None:
    outcomes = Counter(run(target, SEED, number, tmp_path).split()[0].strip(",") for number in range(NUM_CASES))
    assert outcomes["accepted"] > NUM_CASES / 20
    assert outcomes.total() - outcomes["accepted"] > NUM_CASES / 5


@pytest.mark.parametrize("target", TARGETS)
def test_the_files_that_mutants_are_made_from_are_read(target: str, tmp_path: Path) -> None:
    path = tmp_path / TARGETS[target].name
    for number, text in enumerate(TARGETS[target].texts()):
        path.write_text(text)
        chosen = Chosen(number)
        assert TARGETS[target].use(TARGETS[target].read(path, chosen), chosen).startswith("accepted")


class Chosen(cases.Random):
    """Chooses the run whose first trace is the file."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def choice(self, sequence):
        return sequence[self.number]


def test_a_case_is_the_same_whenever_it_is_made() -> None:
    assert len({mutant("plans", 1, number) for number in range(50)}) > 45
    assert mutant("csv", 1, 7) == mutant("csv", 1, 7) != mutant("csv", 2, 7)


def read_by(monkeypatch: pytest.MonkeyPatch, read: object) -> None:
    monkeypatch.setitem(TARGETS, "costs", replace(TARGETS["costs"], read=read))


def test_what_is_raised_by_accident_is_found_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(path: Path, chooser: object) -> str:
        raise KeyError("by accident")

    monkeypatch.chdir(tmp_path)
    read_by(monkeypatch, read)
    outcome, told = failure("costs", 4, 9, tmp_path)
    assert outcome == "failed"
    assert "by accident" in told
    campaign._keep("costs", 4, 9, told)
    assert (tmp_path / "fuzz-failures" / "4-9-costs.json").read_bytes() == mutant("costs", 4, 9)
    assert "python -m fuzz --targets costs --seed 4 --case 9" in capsys.readouterr().out


def test_what_is_accepted_is_to_be_of_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def use(made: object, chooser: object) -> str:
        raise PlanError("not even to be written", "unknown")

    monkeypatch.setitem(TARGETS, "costs", replace(TARGETS["costs"], use=use))
    ends = [failure("costs", 1, number, tmp_path)[0] for number in range(30)]
    assert {"failed", "InputError"} <= {*ends}


def test_what_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path, chooser: object) -> str:
        while True:
            time.process_time()

    read_by(monkeypatch, read)
    monkeypatch.setattr(cases, "_HANG_S", 0.05)
    outcome, told = failure("costs", 1, 1, tmp_path)
    assert (outcome, "Hang" in told) == ("failed", True)
