"""rota export and rota import: what goes out comes back, and what cannot is told in a line."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cli.test_cli import run
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

    cut.json and three-cut.json are the same, and know where the model is cut, as those of autoplan do.
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
    of_three = replace(three, usage=Usage(("1", "4"), 1, 1, (1, 3, 4)))
    (tmp_path / "three-cut.json").write_text(of_three.to_json())
    return tmp_path


def stages_of(told: str) -> list[str]:
    return re.findall(r"^stage \d.*: (.*)$", told, flags=re.MULTILINE)


def test_torchtitan(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = ["export", "torchtitan", "plan.json", "--model"]
    names = ["tok_embeddings layers.0", "layers.1", "layers.2 layers.3", "output"]
    for model, cuts in (("plain", "layers.1,layers.2,output"), ("marked", "0,1,marks[3]")):
        code, out, error = run(capsys, *export, f"model.py:{model}", "--cuts", cuts, "-o", model)
        assert (code, error) == (0, "")
        assert stages_of(out) == names
        assert "Give torchtitan 4 micro-batches of any size: set training.local_batch_size = 4 * " in out
        assert "  torchrun --nproc_per_node 2 -m torchtitan.train --module planned --config" in out
        assert "The plan's backwards are whole, so torch.compile may be on." in out
        code, out, _ = run(capsys, "import", "torchtitan", f"{model}/parallelism.json", "-o", f"{model}.json")
        assert code == 0
        assert stages_of(out) == names
        assert "Cut at the boundaries 0,2,3,5,6." in out
        assert Plan.from_json((here / f"{model}.json").read_text()) == Plan.from_json((here / "plan.json").read_text())
    code, out, _ = run(capsys, *export, "model.py:marked", "-o", "spread")
    assert (code, stages_of(out)[0]) == (0, "tok_embeddings layers.0")
    assert "Checked: every stage runs without the modules of the others" in out
    assert "torchtitan replaces the modules" in run(capsys, "export", "torchtitan", "--help")[1]
    code, out, _ = run(capsys, "export", "torchtitan", "cut.json", "--model", "model.py:marked", "-o", "planned")
    assert (code, stages_of(out)) == (0, ["tok_embeddings layers.0", "layers.1 layers.2", "layers.3", "output"])
    cut = Plan.from_json((here / "cut.json").read_text())
    assert cut.usage is not None
    (here / "twice.json").write_text(replace(cut, usage=replace(cut.usage, num_replicas=2)).to_json())
    twice = ["export", "torchtitan", "twice.json", "--model", "model.py:marked"]
    code, out, _ = run(capsys, *twice, "-o", "twice")
    assert "each in each of 2 pipelines: set training.local_batch_size = 4 (global batch: 2 * 4 = 8 rows)." in out
    assert "data_parallel_shard_degree = 2 has FSDP shard" in out
    assert "torchrun --nproc_per_node 4 " in out
    assert json.loads(run(capsys, *twice, "-o", "again", "--json")[1])["num_replicas"] == 2
    split = NAMED["interleaved_zb"](interleaved(assumed_costs(4).with_split_backward(), Cluster.uniform(2)), 4)
    (here / "split.json").write_text(split.to_json())
    code, out, _ = run(capsys, "export", "torchtitan", "split.json", "--model", "model.py:marked", "-o", "split")
    assert "The plan splits each backward into I and W, which PyTorch cannot do under torch.compile" in out


def test_megatron(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    boundaries = ["--boundaries", "0,4,8,12,16"]
    code, out, error = run(capsys, "export", "megatron", "plan.json", *boundaries, "--mtp", "1", "-o", "layout.txt")
    assert (code, error) == (0, "")
    told = '--pipeline-model-parallel-layout "Et*3|t*4|t*4|ttmL"'
    assert out.splitlines()[0] == f"--num-layers 13 --mtp-num-layers 1 --pipeline-model-parallel-size 2 {told}"
    assert "own order" not in out
    assert (here / "layout.txt").read_text() == "Et*3|t*4|t*4|ttmL\n"
    costs = Costs(forward_us=(1, *[10] * 14, 5), backward_us=(2, *[20] * 14, 10))
    (here / "costs.json").write_text(costs.to_json())
    arguments = ["--ranks", "2", "--microbatches", "4", "--costs", "costs.json", "-o", "back.json"]
    code, out, _ = run(capsys, "import", "megatron", "layout.txt", *arguments)
    assert (code, stages_of(out)) == (0, ["Ettt", "tttt", "tttt", "ttmL"])
    plan = Plan.from_json((here / "back.json").read_text())
    assert plan.orders == Plan.from_json((here / "plan.json").read_text()).orders
    assert [task.duration_us for task in plan.placement.tasks[:4]] == [31, 40, 40, 35]
    code, out, _ = run(capsys, "export", "megatron", "three.json", "--boundaries", "0,2,4,6")
    assert "Megatron runs these stages in its own order" in out
    assert out.endswith("The result was not saved; use -o FILE to save it: Et|tt|tL\n")
    assert run(capsys, "export", "megatron", "cut.json", "--boundaries", "0,2,3,4,5")[1].endswith("save it: Et|t|t|L\n")


def test_megatron_counts_transformer_layers_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    code, out, _ = run(capsys, "export", "megatron", "gpt.json", *layers, "--boundaries", "0,2,5,10,11")
    assert out.endswith("save it: E|t*3|t*4|L\n")


def test_torchtitan_makes_no_weights(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_torchtitan_runs_every_stage_without_the_modules_of_others(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls_all = re.sub(r" if self\.\w+ is not None else x", "", MODEL)
    export = ["export", "torchtitan", "plan.json", "--cuts", "layers.1,layers.2,output"]
    for name, text in (("all", calls_all), ("skips", MODEL), ("large", MODEL.replace("4, 4", "10**9, 10**9"))):
        (here / f"{name}.py").write_text(text.replace("(10, 4)", "(10, 10**9)") if name == "large" else text)
    code, out, error = run(capsys, *export, "--model", "all.py:plain", "-o", "all")
    assert (code, out) == (2, "")
    assert "all.py: stage 0 fails without the modules of the other stages" in error
    assert not (here / "all").exists()
    code, out, _ = run(capsys, *export, "--model", "all.py:plain", "--unchecked", "-o", "all")
    assert code == 0
    assert "so the model's forward must skip them" in out
    code, out, _ = run(capsys, *export, "--model", "skips.py:plain", "-o", "skips")
    assert code == 0
    assert "Checked: every stage runs without the modules of the others" in out
    (here / "large.py").write_text((here / "large.py").read_text().replace("nn.Linear(4, 10)", "nn.Linear(10**9, 10)"))
    code, out, _ = run(capsys, *export, "--model", "large.py:plain", "-o", "large")
    assert code == 0
    assert "Checked, by shapes only: every stage" in out
    assert "together they give outputs of the same shapes and dtypes as the model's." in out
    (here / "fails.py").write_text(MODEL.replace("torch.zeros(rows", "torch.zeros(words"))
    code, out, _ = run(capsys, *export, "--model", "fails.py:plain", "-o", "fails")
    assert code == 0
    assert "This was not checked: fails.py: make_batch(1) failed: NameError: name 'words' is not defined (line" in out


def test_deepspeed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = run(capsys, "export", "deepspeed", "three.json", "--boundaries", "0,3,6,8", "-o", "parts.json")
    assert (code, error, json.loads((here / "parts.json").read_text())) == (0, "", [0, 3, 6, 8])
    assert "DeepSpeed runs these stages in its own order, 1F1B" in out
    code, out, _ = run(capsys, "import", "deepspeed", "parts.json", "--microbatches", "4", "-o", "back.json")
    assert code == 0
    assert "Cut at the boundaries 0,3,6,8." in out
    plan = NAMED["1f1b"](place(assumed_costs(3), Cluster.uniform(3)), 4)
    assert Plan.from_json((here / "back.json").read_text()) == plan
    code, out, _ = run(capsys, "export", "deepspeed", "three.json", "--boundaries", "0,0,3,6")
    assert stages_of(out) == ["no layers", "layers 0 to 2", "layers 3 to 5"]
    assert out.endswith("The result was not saved; use -o FILE to save it: [0, 0, 3, 6]\n")
    code, out, _ = run(capsys, "export", "deepspeed", "three.json", "--boundaries", "0,2,4,6")
    assert 'partition_method="uniform") makes this cut by itself' in out
    code, out, _ = run(capsys, "export", "deepspeed", "three-cut.json")
    assert (code, stages_of(out)) == (0, ["layers 0 to 0", "layers 1 to 3", "layers 4 to 7"])


EXPORT = "export torchtitan plan.json --model"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (
            f"{EXPORT} model.py:plain -o titan",
            "the model has no CutPoint; give --cuts, the module that each stage after",
        ),
        (f"{EXPORT} model.py:plain --cuts a,,b -o titan", "'a,,b' has an empty entry"),
        (f"{EXPORT} model.py:marked --cuts 0,1,marks[9] -o titan", "did you mean 'marks[3]'?"),
        (f"{EXPORT} model.py:fails -o titan", "fails() failed: KeyError: 'no words'"),
        (f"{EXPORT} model.py:layers -o titan", "layers() returned a list; return an nn.Module"),
        (f"{EXPORT} model.py:make -o titan", "model.py has no function 'make'"),
        (f"{EXPORT} model.py -o titan", "give FILE.py:FUNCTION, such as model.py:make_model"),
        (f"{EXPORT} none.py:make -o titan", "cannot read none.py: No such file or directory"),
        (f"{EXPORT} plan.json:make -o titan", "give FILE.py:FUNCTION"),
        (f"{EXPORT} model.py:marked -o model.py", "model.py already exists"),
        (f"{EXPORT} bare.py:marked -o titan", "bare.py has no make_batch(rows); it is needed to cut a model at its"),
        ("export megatron plan.json --boundaries 0,4,8", "make 2 parts for 4 stages; give 5 entries"),
        ("export megatron plan.json --boundaries 0,x", "'x' in '0,x' is not a number of layers"),
        ("export megatron plan.json", "plan.json does not say where the model is cut; give --boundaries"),
        ("export megatron cut.json", "which of the layers that cut.json cuts at 0,1,3,4,5 are transformer layers?"),
        ("export megatron cut.json --layers a*5", "--type and --layers go together"),
        (
            "export megatron cut.json --layers a*5 --type a --mtp 1",
            "--layers cannot mark layers of multi-token prediction",
        ),
        ("export megatron cut.json --layers a*6 --type a", "boundaries end with 5, but there are 6 layers"),
        ("export megatron cut.json --layers e,a,n,a,h --type a", "layer 2 (n) is between transformer layers"),
        ("export deepspeed three.json", "three.json does not say where the model is cut; give --boundaries"),
        ("export megatron cut.json --type a --layers B*x", "'B*x' is not a layer; write, for example, Block, or B"),
        ("export nemo plan.json", "No such command 'nemo'; see rota export --help"),
        ("import megatrom x", "Did you mean 'megatron'?"),
        ("import megatron none.txt --ranks 2 --microbatches 4", "cannot read none.txt: No such file or directory"),
        ("import megatron plan.json --ranks 2 --microbatches 4", "plan.json: layout, character 1: '{"),
        ("import megatron good.txt --ranks 3 --microbatches 4", "good.txt: the layout has 4 stages for 3 ranks"),
        (
            "import deepspeed falling.json --microbatches 4",
            "falling.json: boundaries 0,3,2 fall from 3 to 2 at entry 2",
        ),
        ("import torchtitan empty.json", "empty.json: parallelism has neither of pipeline_parallel_module_fqns_per"),
    ],
)
def test_what_cannot_be_is_told_in_a_line(
    command: str, told: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "good.txt").write_text("Et|tt|tt|tL")
    (here / "falling.json").write_text("[0, 3, 2]")
    (here / "empty.json").write_text("{}")
    before = sorted(here.rglob("*.*"))
    code, _, error = run(capsys, *command.split())
    assert code == 2
    assert error.count("\n") == 1
    assert told in error
    assert [path for path in sorted(here.rglob("*.*")) if "__pycache__" not in path.parts] == before


def test_a_plan_that_must_not_run_goes_nowhere(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "cycle.csv").write_text("0B0,0F0\n1F0,1B0\n")
    code, _, error = run(capsys, "export", "megatron", "cycle.csv", "--boundaries", "0,2,4")
    assert (code, "refused" in error) == (1, True)
