"""A short form of `make fuzz`, and that a campaign sees what it is for."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fuzz import campaign, cases, checkpoints
from fuzz.cases import CHECKPOINTS, NAMES, TARGETS, failure, mutant, run
from rota import PlanError
from support.sampling import some

SEED, NUM_CASES = 0, some(120)


@pytest.fixture(scope="module", autouse=True)
def no_training_is_left() -> Iterator[None]:
    yield
    if checkpoints.training.cache_info().currsize:
        checkpoints.training().close()
        checkpoints.training.cache_clear()


@pytest.mark.parametrize("target", NAMES)
def test_a_wrong_file_is_refused_in_words_or_read_right(target: str, tmp_path: Path) -> None:
    outcomes = Counter(run(target, SEED, number, tmp_path).split()[0].strip(",") for number in range(NUM_CASES))
    assert outcomes["accepted"] > NUM_CASES / 40
    assert outcomes.total() - outcomes["accepted"] > NUM_CASES / 8


@pytest.mark.parametrize("target", TARGETS)
def test_the_files_that_mutants_are_made_from_are_read(target: str, tmp_path: Path) -> None:
    path = tmp_path / TARGETS[target].name
    for number, text in enumerate(TARGETS[target].texts()):
        path.write_text(text)
        chosen = Chosen(number)
        assert TARGETS[target].use(TARGETS[target].read(path, chosen), chosen).startswith("accepted")


def test_a_checkpoint_of_which_nothing_is_wrong_is_loaded() -> None:
    assert checkpoints.use(dict(checkpoints.whole()), cases.Random(1)) == "accepted"


@pytest.mark.parametrize("by_torch", [False, True])
def test_no_pickle_is_read_unseen(by_torch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own reader of pickles is told, whatever it reads; Python's, once a pickle names something."""
    monkeypatch.setattr(os, "system", lambda command: 0)
    fspath = pathlib.PurePath.__fspath__
    told = []
    for payload in checkpoints.payloads():

        def read(*args: object, payload: bytes = payload) -> str:
            with suppress(Exception):
                torch.load(io.BytesIO(payload)) if by_torch else pickle.loads(payload)
            return "accepted"

        monkeypatch.setattr(checkpoints, "_read", read)
        try:
            told.append(checkpoints.use(dict(checkpoints.whole()), cases.Random(1)))
        except AssertionError as error:
            told.append(str(error))
        finally:
            pathlib.PurePath.__fspath__ = fspath  # type: ignore[method-assign]
            os.environ.pop("ROTA_CANARY", None)
    num_seen = sum("was unpickled, or ran something" in words for words in told)
    num_of_torch, num_cut_off = 6, 1  # what torch.save writes begins with other things
    assert num_seen == len(told) - (0 if by_torch else num_of_torch + num_cut_off)


def test_a_folder_that_ends_badly_is_kept(tmp_path: Path) -> None:
    path = cases.keep(CHECKPOINTS, 4, 9, tmp_path)
    assert {file.name for file in (path / "step-2").iterdir()} == {*checkpoints.mutant(cases.Random("checkpoints 4 9"))}


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
