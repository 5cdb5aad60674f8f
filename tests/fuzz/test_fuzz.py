"""Wrong files are refused in words or read right: a few here, and 258,000 by `make fuzz`, which sets ROTA_FUZZ."""

import os
import pickle
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuzz import cases, checkpoints
from fuzz.cases import NAMES, num_cases, run
from support.sampling import some

IS_LONG = "ROTA_FUZZ" in os.environ
SEED = int(os.environ.get("ROTA_FUZZ") or 0)
_CHUNK = 500 if IS_LONG else some(120)
_MORE_BYTES = 1024**3  # that the process may take beyond what it begins with

CHUNKS = [
    (target, range(first, first + _CHUNK))
    for target in NAMES
    for first in (range(0, num_cases(target), _CHUNK) if IS_LONG else (0,))
]


@pytest.fixture(scope="module", autouse=True)
def limited() -> Iterator[None]:
    """An allocation beyond the limit fails as MemoryError, which no case may raise. No training is left."""
    if IS_LONG:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MORE_BYTES, resource.RLIM_INFINITY))
    yield
    if checkpoints.training.cache_info().currsize:
        checkpoints.training().close()
        checkpoints.training.cache_clear()


@pytest.mark.parametrize(("target", "numbers"), CHUNKS, ids=str)
def test_a_wrong_file_is_refused_in_words_or_read_right(target: str, numbers: range, tmp_path: Path) -> None:
    outcomes = Counter(run(target, SEED, number, tmp_path).split()[0].strip(",") for number in numbers)
    assert outcomes["accepted"] > len(numbers) / 40
    assert outcomes.total() - outcomes["accepted"] > len(numbers) / 8


def test_a_pickle_that_is_read_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is loaded and verified above, nothing may have been unpickled."""
    monkeypatch.setenv("ROTA_CANARY", "")  # and gone again afterwards
    monkeypatch.setattr(checkpoints, "_read", lambda *_: pickle.loads(checkpoints.payloads()[0]))
    with pytest.raises(AssertionError, match="was unpickled, or ran something"):
        checkpoints.use(dict(checkpoints.whole()), cases.Random(1))
