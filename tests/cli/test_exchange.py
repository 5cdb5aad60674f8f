"""rota export and rota import: what goes out comes back, and what cannot is told in a line."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cli.test_cli import Capsys, printed, refused, run
from rota import Cluster, Costs, Plan, interleaved, place
from rota.core.costs import assumed_costs
from rota.core.plan import Usage
from rota.schedules import NAMED

MODEL = """
import torch
from torch import nn
from rota import CutPoint


class GPT(nn.Module):
    def __init__(self, marked):
        super().__init__()
        self.tok_embeddings = nn.Embedding(10, 4)
        self.layers = nn.ModuleDict({str(i): nn.Linear(4, 4) for i in range(4)})
        self.output = nn.Linear(4, 10)
        self.marks = [CutPoint() for _ in range(4)] if marked else []

    def forward(self, x):
        x = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for i, layer in self.layers.items():
            x = layer(x)
            if self.marks:
                x = self.marks[int(i)](x)
        return self.output(x) if self.output is not None else x


def make_batch(rows):
    return torch.zeros(rows, 3, dtype=torch.long), None


def marked():
    return GPT(True)


def plain():
    return GPT(False)


def fails():
    raise KeyError("no words")


def layers():
    return [1, 2]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with model.py, plan.json (two ranks, four stages) and three.json (a stage a rank).

    cut.json is plan.json, and knows where the model is cut, as those of autoplan do.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "bare.py").write_text(MODEL.replace("make_batch", "other"))
    plan = NAMED["interleaved_1f1b"](interleaved(assumed_costs(4), Cluster.uniform(2)), 4)
    (tmp_path / "plan.json").write_text(plan.to_json())
    three = NAMED["gpipe"](place(Costs.uniform(3), Cluster.uniform(3)), 4)
    (tmp_path / "three.json").write_text(three.to_json())
    cut = replace(plan, usage=Usage(("marks[0]", "marks[2]", "marks[3]"), 1, 1, (1, 2, 1, 1)))
    (tmp_path / "cut.json").write_text(cut.to_json())
    return tmp_path


def stages_of(told: str) -> list[str]:
    return re.findall(r"^stage \d.*: (.*)$", told, flags=re.MULTILINE)


def test_torchtitan(here: Path, capsys: Capsys) -> None:
    export = ["export", "torchtitan", "plan.json", "--model"]
    names = ["tok_embeddings layers.0", "layers.1", "layers.2 layers.3", "output"]
    for model, cuts in (("plain", "layers.1,layers.2,output"), ("marked", "0,1,marks[3]")):
        code, out, error = run(capsys, *export, f"model.py:{model}", "--cuts", cuts, "-o", model)
        assert (code, error) == (0, "")
        assert stages_of(out) == names
        assert "Give torchtitan 4 micro-batches of any size: set training.local_batch_size = 4 * " in out
        assert "  torchrun --nproc_per_node 2 -m torchtitan.train --module planned --config" in out
        assert "The plan's backwards are whole, so torch.compile may be on." in out
        out = printed(capsys, "import", "torchtitan", f"{model}/parallelism.json", "-o", f"{model}.json")
        assert stages_of(out) == names
        assert "Cut at the boundaries 0,2,3,5,6." in out
        assert Plan.from_json((here / f"{model}.json").read_text()) == Plan.from_json((here / "plan.json").read_text())
    code, out, _ = run(capsys, *export, "model.py:marked", "-o", "spread")
    assert (code, stages_of(out)[0]) == (0, "tok_embeddings layers.0")
    assert "Checked: every stage runs without the modules of the others" in out
    code, out, _ = run(capsys, "export", "torchtitan", "cut.json", "--model", "model.py:marked", "-o", "planned")
    assert (code, stages_of(out)) == (0, ["tok_embeddings layers.0", "layers.1 layers.2", "layers.3", "output"])
    cut = Plan.from_json((here / "cut.json").read_text())
    (here / "twice.json").write_text(replace(cut, usage=replace(cut.usage, num_replicas=2)).to_json())
    twice = ["export", "torchtitan", "twice.json", "--model", "model.py:marked"]
    code, out, _ = run(capsys, *twice, "-o", "twice")
    assert "each in each of 2 pipelines: set training.local_batch_size = 4 (global batch: 2 * 4 = 8 rows)." in out
    assert "data_parallel_shard_degree = 2 has FSDP shard" in out
    assert "torchrun --nproc_per_node 4 " in out


def test_megatron_counts_transformer_layers_alone(here: Path, capsys: Capsys) -> None:
    """What autoplan counts may be norms and heads as well."""
    plan = Plan.from_json((here / "cut.json").read_text())
    usage = Usage(("3", "5", "7"), 1, 1, (3, 2, 2, 4))
    (here / "gpt.json").write_text(replace(plan, usage=usage).to_json())
    layers = ["--layers", "Embed, Dropout, Block*7, LayerNorm, Head", "--type", "BLOCK"]
    code, out, error = run(capsys, "export", "megatron", "gpt.json", *layers)
    assert (code, error) == (0, "")
    assert out.splitlines()[0].startswith("--num-layers 7 --pipeline-model-parallel-size 2 ")
    assert out.endswith("save it: Et|tt|tt|ttL\n")
    code, out, _ = run(capsys, "export", "megatron", "gpt.json", *layers, "--boundaries", "0,2,5,9,11")
    assert out.endswith("save it: E|t*3|t*4|L\n")


def test_torchtitan_makes_no_weights(here: Path, capsys: Capsys) -> None:
    """A model too large for any memory, with its layers in a file beside it that is imported late."""
    (here / "sub").mkdir()
    (here / "sub" / "neighbour.py").write_text(
        MODEL.replace("4, 4", "10**9, 10**9").replace("nn.Linear(4", "nn.Linear(10**9").replace("0, 4)", "0, 10**9)")
    )
    (here / "sub" / "late.py").write_text(
        "def make():\n    from neighbour import GPT\n    return GPT(True)\n\n"
        "def make_batch(rows):\n    from neighbour import make_batch\n    return make_batch(rows)\n"
    )
    cuts = ["--cuts", "0,1,marks[3]"]
    code, out, error = run(
        capsys, "export", "torchtitan", "plan.json", "--model", "sub/late.py:make", *cuts, "-o", "large"
    )
    assert (code, error) == (0, "")
    assert stages_of(out) == ["tok_embeddings layers.0", "layers.1", "layers.2 layers.3", "output"]
    assert str(here / "sub") not in sys.path


EXPORT = "export torchtitan plan.json --model"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (f"{EXPORT} model.py:plain -o titan", "the model has no CutPoint; give --cuts, the module that each stage"),
        (f"{EXPORT} model.py:marked --cuts 0,1,marks[9] -o titan", "did you mean 'marks[3]'?"),
        (f"{EXPORT} model.py:layers -o titan", "layers() returned a list; return an nn.Module"),
        (f"{EXPORT} model.py:make -o titan", "model.py has no function 'make'"),
        (f"{EXPORT} model.py -o titan", "give FILE.py:FUNCTION, such as model.py:make_model"),
        (f"{EXPORT} model.py:marked -o model.py", "model.py already exists"),
        (f"{EXPORT} bare.py:marked -o titan", "bare.py has no make_batch(rows); it is needed to cut a model at its"),
        ("export megatron cut.json", "which of the layers that cut.json cuts at 0,1,3,4,5 are transformer layers?"),
        ("export megatron cut.json --layers a*5 --type a --mtp 1", "--layers cannot mark layers of multi-token"),
        ("export deepspeed three.json", "three.json does not say where the model is cut; give --boundaries"),
        ("import megatrom x", "Did you mean 'megatron'?"),
        ("import megatron good.txt --ranks 3 --microbatches 4", "good.txt: the layout has 4 stages for 3 ranks"),
        ("import torchtitan empty.json", "empty.json: parallelism has neither of pipeline_parallel_module_fqns_per"),
    ],
)
def test_what_cannot_be_is_told_in_a_line(command: str, told: str, here: Path, capsys: Capsys) -> None:
    (here / "good.txt").write_text("Et|tt|tt|tL")
    (here / "empty.json").write_text("{}")
    before = sorted(here.rglob("*.*"))
    assert told in refused(capsys, 2, *command.split())
    assert [path for path in sorted(here.rglob("*.*")) if "__pycache__" not in path.parts] == before
