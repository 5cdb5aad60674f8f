"""`rota autoplan`: from a profile or a model's file to a plan that says how it is used."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import rota
from cli.test_cli import Capsys
from planning.test_autoplan import UNEVEN, layer_costs
from rota import PipelineError, Profile
from rota.cli import main
from rota.cli.common import parse_link
from rota.core.plan import Usage
from rota.runtime import host_memory
from rota.runtime.launching.launch import Launch, Run
from support.model_file import MODEL


def told_by(capsys: Capsys, profile: str, output: Path, *options: str) -> str:
    asked = ["--ranks", "2", "--pipeline", "2", "--batch", "8", "--time-limit", "600", *options]
    assert main(["autoplan", "--profile", profile, *asked, "--force", "-o", str(output)]) == 0
    return capsys.readouterr().out


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("rota.planning.sweep.can_search", lambda: False)  # named schedules will do
    path = tmp_path / "profile.json"
    path.write_text(Profile(tuple(layer_costs(rows, UNEVEN, parameters=100) for rows in (1, 2))).to_json())
    return str(path)


def test_from_profile_to_plan(profile: str, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    output = tmp_path / "plan.json"
    machine = ["--ranks", "4", "--memory", "1000B", "--link", "1us,4MB/s", "--node", "2", "--node-link", "3us,1MB/s"]
    search = ["--time-limit", "600", "--slowdowns", "1,1,1,2"]
    assert main(["autoplan", "--profile", profile, *machine, "--batch", "16", *search, "-o", str(output)]) == 0
    told = capsys.readouterr().out
    assert "rows/s" in told
    assert f"Wrote {output}" in told
    plan = rota.Plan.from_json(output.read_text())
    assert plan.usage.microbatch_rows * plan.num_microbatches * plan.usage.num_replicas == 16
    assert len(plan.usage.num_layers) == plan.num_stages
    assert sum(plan.usage.num_layers) == len(UNEVEN)
    header = next(line for line in told.splitlines() if "micro-batches  recomputed" in line)
    legend = told.partition(header)[2].partition("▸ best plan")[2]
    for word in ("ranks:", "micro-batches:", "bubble:", "gap:", "memory:"):
        assert word in legend
    assert max(rota.simulate(plan).peak_memory_bytes) <= 1000
    assert main(["check", str(output)]) == 0


def test_measured_links(profile: str, tmp_path: Path) -> None:
    """Those between the halves of the machine are so slow that nothing is sent over them."""
    halves = [(a, b, rota.Link(10**7)) for a in range(4) for b in range(4) if a // 2 != b // 2]
    measured, output = tmp_path / "cluster.json", tmp_path / "plan.json"
    measured.write_text(rota.Cluster((None,) * 4, rota.Link(1, 10**6), tuple(halves)).to_json())
    given = ["autoplan", "--profile", profile, "--ranks", "4", "--batch", "16", "--links", str(measured)]
    assert main([*given, "--time-limit", "600", "-o", str(output)]) == 0
    plan = rota.Plan.from_json(output.read_text())
    assert plan.num_ranks * plan.usage.num_replicas <= 2
    assert {route.duration_us < 10**7 for route in plan.placement.routes} <= {True}


def test_the_rows_may_be_chosen_and_inference_has_forwards_alone(profile: str, tmp_path: Path, capsys: Capsys) -> None:
    output = tmp_path / "plan.json"
    given = ["autoplan", "--profile", profile, "--ranks", "2", "--batch", "8", "--inference"]
    assert main([*given, "--rows", "2", "-o", str(output)]) == 0
    told = capsys.readouterr().out
    assert f"  rota run {output} infer.py    # run the model with it\n" in told
    assert "rota verify" not in told  # it refuses a plan without backwards
    plan = rota.Plan.from_json(output.read_text())
    assert plan.usage.microbatch_rows == 2
    assert {task.kind for task in plan.placement.tasks} == {rota.Kind.F}
    assert main([*given, "--rows", "3"]) == 2
    assert "--rows 3: " in capsys.readouterr().err


@pytest.mark.dist  # measuring stages starts processes
def test_links_that_are_not_measured_are_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    def links(*_: object, **__: object) -> rota.Cluster:
        raise PipelineError("the machine is too busy")

    monkeypatch.setattr("rota.profiling.machine_links.links_of_this_machine", links)
    monkeypatch.setattr("rota.profiling.devices.why_not_here", lambda _: "")
    model = tmp_path / "model.py"
    model.write_text(MODEL)
    given = [str(model), "--ranks", "2", "--batch", "4", "--rows", "2", "--cache", str(tmp_path), "--time-limit", "3"]
    assert main(["autoplan", *given]) == 0
    told = capsys.readouterr().out
    because = "because links were not measured (the machine is too busy)"
    once = " ".join(told.split())  # whatever the width of the terminal
    assert once.startswith(f"Transfers are counted as free, {because}; give --link or --links")
    assert once.count("counted as free") == 1


BLOCKS = """
import torch
from torch import nn
from rota import CutPoint

class Block(nn.Module):
    def __init__(self, mark=None):
        super().__init__()
        self.attention, self.mlp, self.mark = nn.Linear(4, 4), nn.Linear(4, 4), mark
        self.cut = CutPoint() if mark else None

    def forward(self, x):
        x = self.attention(x)
        x = self.cut(x) if self.mark == "inside" else x
        x = self.mlp(x)
        return self.cut(x) if self.mark == "end" else x

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Linear(4, 4), nn.ModuleList([Block(MARK) for _ in range(3)])

    def forward(self, x):
        x = self.embed(x) if self.embed is not None else x
        for layer in self.layers:
            x = layer(x)
        return x

def make_model():
    return Model()

def make_batch(rows):
    return torch.ones(rows, 4), torch.ones(rows, 4)

loss_fn = nn.functional.mse_loss
"""


@pytest.mark.parametrize(
    ("mark", "cuts", "told"),
    [
        (None, "layers.*.mlp", "at layers.0.mlp, because it is inside layers.0, .* with --cuts 'layers.*', or"),
        ("'inside'", None, "at layers.0.cut, because it is inside layers.0, .* call the CutPoint between bl"),
        (None, "layers.*", ""),
    ],
)
def test_cuts_that_no_other_trainer_can_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys, mark: str | None, cuts: str | None, told: str
) -> None:
    """Refused because of the names in a profile, before anything is searched."""
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(BLOCKS.replace("MARK", str(mark)))
    options = ["--ranks", "2", "--batch", "4", "--exportable", "--time-limit", "600", "-o", "plan.json"]
    given = [] if cuts is None else ["--cuts", cuts]
    for profiled in (["model.py", *given, "--device", "h100"], ["--profile", "profile.json"]):
        if "--profile" in profiled:
            assert main(["profile", "model.py", *given, "--device", "h100", "-o", "profile.json"]) == 0
        code = main(["autoplan", *profiled, *options, "--force"])
        error = capsys.readouterr().err
        assert code == (2 if told else 0)
        assert ("--exportable: other trainers cannot begin a stage at" in error) == bool(told)
        assert re.search(told, error)
        assert Path("plan.json").exists() is not bool(told)


def test_a_model_too_large_for_this_machine_is_estimated(tmp_path: Path, capsys: Capsys) -> None:
    model = tmp_path / "model.py"
    model.write_text(MODEL.replace("4", "90_000"))  # 130 GB with gradients
    machine = ["--ranks", "8", "--memory", "120GB", "--batch", "8", "--rows", "1", "--device", "h100"]
    assert main(["autoplan", str(model), *machine, "--time-limit", "600"]) == 0
    assert " of 120 GB" in capsys.readouterr().out


def test_a_run_has_the_replicas_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[int, int]] = []

    def launch(_plan: rota.Plan, _script: str, _arguments: list[str], how: Launch, *_: object) -> Run:
        started.append((how.dp, how.tp))
        return Run(None, None)

    monkeypatch.setattr("rota.runtime.launching.launch.launch", launch)
    placement = rota.place(rota.Costs.uniform(2), rota.Cluster.uniform(2))
    plan = replace(rota.schedules.gpipe(placement, 2), usage=Usage(("cuts[0]",), 1, 3))
    planned, script = tmp_path / "plan.json", tmp_path / "train.py"
    planned.write_text(plan.to_json())
    script.write_text("")
    assert main(["run", str(planned), str(script)]) == 0
    assert main(["run", "--mesh", "dp=2,tp=2", str(planned), str(script)]) == 0
    assert started == [(3, 1), (2, 2)]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "nothing to plan; give MODEL.py, or --profile"),
        (["--profile", "PROFILE", "--node-link", "5us"], "--node-link is between nodes; give the ranks per node"),
        (["--profile", "PROFILE", "--link", "5us", "--links", "PROFILE"], "has all links; leave --link and --node out"),
        (["--profile", "PROFILE", "--memory", "80"], "'80' has no unit; write, for example, 80GB, or 80B for bytes"),
        (["--profile", "PROFILE", "--memory", "80%"], "a share of which device's memory? give it in GB, or name"),
        (["--profile", __file__], "is a Python file; run a script with"),
        (["PROFILE"], "is not a Python file; give a profile with --profile "),
        (["--profile", "nowhere.json"], "cannot read nowhere.json"),
        (["--profile", "PROFILE", "--copies", "--inference"], "--copies: with --inference, no plan has a stage on two"),
    ],
)
def test_what_cannot_be_planned(arguments: list[str], told: str, profile: str, capsys: Capsys) -> None:
    given = [profile if argument == "PROFILE" else argument for argument in arguments]
    code = main(["autoplan", "--ranks", "2", "--batch", "8", *given])
    assert code == (1 if told.startswith("found nothing that fits") else 2)
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(("device", "limit"), [("h100", "64 GB"), ("H200", "113 GB")])
def test_a_limit_is_a_share_of_the_device(device: str, limit: str, profile: str, capsys: Capsys) -> None:
    given = ["--ranks", "2", "--batch", "8", "--device", device, "--memory", "80%", "--time-limit", "600"]
    assert main(["autoplan", "--profile", profile, *given]) == 0
    assert f" of {limit}" in capsys.readouterr().out


def test_the_largest_machine_is_looked_at(profile: str, capsys: Capsys) -> None:
    largest = ["--ranks", "100000", "--batch", "8", "--time-limit", "600"]
    assert main(["autoplan", "--profile", profile, *largest]) == 0
    assert " of 100000" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "link"), [("5us,50GB/s", (5, 50_000)), (" 2 µs , 100MB/s ", (2, 100))])
def test_links_as_people_write_them(text: str, link: tuple[int, int | None]) -> None:
    assert parse_link(text) == link


@pytest.mark.parametrize("text", ["", "5us,5us", "5us,1GB/s,2us", "1B/s", "-5us", "5us,xGB/s"])
def test_no_links(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a (link|size)"):
        parse_link(text)


BY_HAND = """
import torch
from torch import nn
import rota

class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        return {"left": y, "all": y}

class Add(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, left, right):
        return self.linear(left) + right

def make_model():
    torch.manual_seed(0)
    layers = [Embed(), nn.Linear(16, 16), nn.Linear(16, 16), Add()]
    return rota.Stages(layers, [(0, 1, "left"), (1, 2), (2, 3), (0, 3, "all")])

def make_batch(rows):
    return torch.ones(rows, 16), torch.ones(rows, 16)

loss_fn = nn.functional.mse_loss
"""


def test_stages_made_by_hand_are_merged_into_those_of_a_plan(tmp_path: Path) -> None:
    model, output = tmp_path / "model.py", tmp_path / "plan.json"
    model.write_text(BY_HAND)
    given = [str(model), "--ranks", "2", "--pipeline", "2", "--batch", "8", "--rows", "2", "--device", "h100"]
    assert main(["autoplan", *given, "-o", str(output)]) == 0
    plan = rota.Plan.from_json(output.read_text())
    assert plan.num_ranks == 2
    assert len(plan.cuts) == plan.num_stages - 1
    assert {*plan.cuts} <= {"1", "2", "3"}


def test_a_plan_for_other_machines(
    profile: str, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "plan.json"
    export = f"  rota export torchtitan {output} --model MODEL.py:make_model -o titan    # or megatron, deepspeed\n"
    here = told_by(capsys, profile, output)
    assert ". Next:\n  rota verify" in here
    assert export not in here
    monkeypatch.setattr(host_memory, "total_bytes", lambda: 1000)
    large = told_by(capsys, profile, output)
    assert re.search(r"that the plan is for \(its ranks need [\d.]+ kB, and this machine has 1 kB\):\n  rota", large)
    estimates = tuple(replace(layer_costs(rows, UNEVEN, parameters=100), note="estimated for h100") for rows in (1, 2))
    Path(profile).write_text(Profile(estimates).to_json())
    estimated = told_by(capsys, profile, output, "--exportable", "--whole-backward")
    assert "(the plan is estimated for h100, not measured here):\n  rota verify" in estimated
    assert export in estimated
