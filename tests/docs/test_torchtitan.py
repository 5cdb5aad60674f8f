"""The page for users of torchtitan: a Llama is planned for GPUs that are not here, and exported."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rota.cli import main
from support import ROOT

PAGE = (ROOT / "docs" / "torchtitan.md").read_text()
SMALL = {"DIM": 64, "NUM_LAYERS": 8, "NUM_HEADS": 4, "NUM_KV_HEADS": 2, "HIDDEN": 96, "VOCABULARY": 4096, "LENGTH": 16}


@pytest.mark.sweep  # of smaller models in interop/test_torchtitan.py
def test_llama_is_planned_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (model,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names, sizes = ", ".join(SMALL), ", ".join(map(str, SMALL.values()))
    small, replaced = re.subn(rf"^{names} = .*$", f"{names} = {sizes}", model, flags=re.MULTILINE)
    assert replaced == 1
    Path("llama.py").write_text(small)
    profile = ["llama.py", "--cuts", "layers.*", "--rows", "1", "--device", "h100", "-o", "profile.json"]
    assert main(["profile", *profile]) == 0
    machine = ["--ranks", "4", "--pipeline", "4", "--batch", "8", "--memory", "70GB", "--link", "5us,300GB/s"]
    limit = ["--exportable", "--time-limit", "600"]
    assert main(["autoplan", "--profile", "profile.json", *machine, *limit, "-o", "plan.json"]) == 0
    assert main(["export", "torchtitan", "plan.json", "--model", "llama.py:make_model", "-o", "titan"]) == 0
    config = json.loads(Path("titan/parallelism.json").read_text())
    parts = config["pipeline_parallel_module_fqns_per_model_part"]
    assert [name for part in parts for name in part] == [
        "tok_embeddings",
        *(f"layers.{i}" for i in range(8)),
        "norm",
        "output",
    ]
    assert main(["check", "titan/schedule_comms.csv", "--torch"]) == 0
    assert "cannot" in capsys.readouterr().out
