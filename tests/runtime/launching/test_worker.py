"""How a rank runs the script: as it was when the run began."""

from __future__ import annotations

import inspect
import sys
import traceback
from pathlib import Path

import pytest

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
