"""How a rank runs the script: as it was when the run began."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rota
from rota.runtime.launcher_files import keep_script, kept_script
from rota.runtime.launching import worker

SCRIPT = '''"""Words."""
import pickle, sys
assert __name__ == "__main__" and __doc__ == "Words."
def halve(number):
    return number / 0  # on purpose
assert pickle.loads(pickle.dumps(halve)) is halve
print(__file__, vars().get("annotations"))
halve(1)
'''


def call_as(file: Path) -> Callable[[Callable[[], None]], None]:
    """A function that calls another one, as if it were in `file`."""
    space: dict[str, Any] = {}
    exec(compile("def call(function):\n    return function()\n", str(file), "exec"), space)
    call: Callable[[Callable[[], None]], None] = space["call"]
    return call


IN_ROTA, IN_TORCH = (call_as(Path(package.__file__).parent / "made_up.py") for package in (rota, torch))


def told(function: Callable[[], object]) -> str:
    with pytest.raises(ValueError, match="no loss") as raised:
        function()
    return "".join(worker._traceback(raised.value).format())


def loss_fn() -> None:
    raise ValueError("no loss today")


def fails_in_an_op() -> None:
    try:
        IN_ROTA(lambda: IN_TORCH(loss_fn))
    except ValueError as error:
        error.add_note("rota: in 1F0 on rank 1, stage 1 (Head)")
        raise


def test_an_error_of_the_users_code_is_shown_without_frames_of_rota_and_pytorch() -> None:
    text = told(lambda: IN_ROTA(lambda: IN_ROTA(fails_in_an_op)))
    assert "made_up.py" not in text
    assert text.count("in loss_fn\n") == 1
    assert text.endswith("ValueError: no loss today\nrota: in 1F0 on rank 1, stage 1 (Head)\n")

    def chained() -> None:
        try:
            fails_in_an_op()
        except ValueError as error:
            raise ValueError("no loss either") from error

    text = told(chained)
    assert "made_up.py" not in text
    assert "The above exception was the direct cause" in text


def test_an_error_of_rotas_own_code_keeps_its_frames() -> None:
    def fails() -> None:
        exec(compile("raise ValueError('no loss')", str(Path(rota.__file__).parent / "made_up.py"), "exec"))

    text = told(lambda: IN_TORCH(lambda: IN_ROTA(fails)))
    assert text.count('made_up.py", line ') == 3


def test_a_changed_file_changes_neither_the_script_nor_its_tracebacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    Path("train.py").write_text(SCRIPT)
    (tmp_path / "folder").mkdir()
    monkeypatch.setenv("ROTA_FOLDER", str(tmp_path / "folder"))
    keep_script("train.py", str(tmp_path / "folder"))
    Path("train.py").write_text("exit('changed')\n")
    with pytest.raises(ZeroDivisionError) as error:
        worker._run("train.py", kept_script())
    assert capsys.readouterr().out == "train.py None\n"  # and no future import of the worker's
    told = "".join(traceback.format_exception(error.value))
    assert 'File "train.py", line 5, in halve\n    return number / 0  # on purpose\n' in told
    assert inspect.getsource(sys.modules["__main__"].halve).startswith("def halve(number):\n    return number / 0")
