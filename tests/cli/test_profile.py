"""`rota profile` in one process: the file of a model, what it lacks, the cache."""

from pathlib import Path

import pytest
import torch

from cli.test_cli import Capsys, printed, refused, run
from rota import Profile, Size, SizeModel, split
from rota.planning.model_file import load_model_file, profile_file
from rota.planning.request import Measuring

MODEL = """
import torch
from torch import nn
from torch.nn import functional

def make_model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

def make_batch(rows):
    return torch.zeros(rows, 4), torch.zeros(rows, dtype=torch.int64)

def loss_fn(output, target):
    return functional.cross_entropy(output, target)
"""
OPTIMIZER = "def make_optimizer(parameters):\n    return torch.optim.AdamW(parameters)\n"


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rota.profiling.layer_measurement._RUN_NS", 0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODEL + OPTIMIZER)
    return path


def test_a_profile_is_written_for_each_number_of_rows(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    output = tmp_path / "profile.json"
    out = printed(capsys, "profile", model, "--rows", "4,1", "-o", output)
    profile = Profile.from_json(output.read_text())
    assert [*profile] == [1, 4]
    assert profile[4].boundary_bytes == (4 * 8 * 4, 4 * 8 * 4)
    parameters = sum(p.numel() * 4 for p in load_model_file(str(model)).make_model().parameters())
    assert sum(profile[4].parameter_bytes) == parameters
    assert sum(profile[4].optimizer_bytes) == 2 * parameters + 4 * 4  # two moments; a number of steps a parameter
    assert len(split(load_model_file(str(model)).make_model(), 3, profile[4].cuts)) == 3
    assert "4 rows per micro-batch, measured on" in out
    assert out.count("layer  F") == 2
    assert len(profile[4].contents) == profile[4].num_layers == 3
    table = [line.split("  ") for line in out.splitlines() if line[:3] in ("1  ", "2  ", "3  ")]
    assert [(row[0], row[-1].strip()) for row in table] == 2 * [*zip("123", profile[4].contents, strict=True)]


def test_an_estimate_makes_the_model_where_it_takes_no_memory(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    huge = MODEL.replace("nn.Linear(4, 8)", "nn.Linear(4, 8 * 10**9)").replace(
        "nn.Linear(8, 2)", "nn.Linear(8 * 10**9, 2)"
    )
    model.write_text(huge + OPTIMIZER)
    output = tmp_path / "profile.json"
    out = printed(capsys, "profile", model, "--device", "h100", "-o", output)
    assert "estimated for h100" in out
    assert Profile.from_json(output.read_text())[1].parameter_bytes[0] == 5 * 8 * 10**9 * 4


LOADS = """
import warnings

make_weights = make_model

def make_model():
    model = make_weights()
    if model[0].weight.is_meta:
        warnings.warn("a warning of the model's own")
    model.load_state_dict({name: torch.ones(weight.shape, device="cpu") for name, weight in model.state_dict().items()})
    return model
"""


def test_weights_that_a_model_loads_are_left_out_of_an_estimate(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    model.write_text(MODEL + OPTIMIZER + LOADS)
    with pytest.warns(UserWarning, match="a warning of the model's own") as told:
        code, out, error = run(capsys, "profile", model, "--device", "h100", "-o", tmp_path / "profile.json")
    assert (code, "estimated for h100" in out) == (0, True)
    assert error == f"{model} loads weights: they are left out here, because only their shapes are needed\n"
    assert len(told) == 1


def test_the_cache_is_used_and_refreshed(model: Path, tmp_path: Path, capsys: Capsys) -> None:
    cache = tmp_path / "cache"
    assert run(capsys, "profile", model, "--device", "h100", "--cache", cache)[0] == 0
    (file,) = cache.iterdir()
    assert file.name == "sequential-h100.json"
    before = file.read_text()
    assert run(capsys, "profile", model, "--device", "h100", "--cache", cache)[0] == 0
    assert file.read_text() == before
    model.write_text(MODEL)
    told = refused(capsys, 2, "profile", model, "--device", "h100", "--cache", cache)
    assert "is stale: optimizer was make_optimizer" in told
    assert run(capsys, "profile", model, "--device", "h100", "--cache", cache, "--refresh")[0] == 0
    assert "optimizer was" not in file.read_text() != before


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (MODEL.replace("def make_batch", "def batches"), "no function make_batch; it needs:\n    def make_model"),
        (MODEL.replace("nn.Linear(4, 8)", "nn.Linear(4, -8)"), "make_model failed: RuntimeError: "),
        (MODEL.replace("return torch.zeros(rows, 4), ", "return "), "make_batch(2) did not return a pair"),
        (MODEL.replace("torch.zeros(rows, 4)", "torch.zeros(3, 4)"), "the batch for 2 rows has 3; return 2"),
    ],
)
def test_what_a_file_lacks_is_told(source: str, told: str, model: Path, capsys: Capsys) -> None:
    model.write_text(source)
    code, out, error = run(capsys, "profile", model, "--rows", "2")
    assert code in (1, 2)
    assert out == ""
    assert told in error
    assert "Traceback" not in error


def test_options_that_do_not_belong_are_refused(model: Path, capsys: Capsys) -> None:
    for arguments, told in (
        (("links", "--rows", "2"), "--rows is for a model"),
        (("links", "--device", "h100"), "device 'h100': PyTorch finds no accelerator on this machine; give auto"),
        ((model, "--device", "h10"), "did you mean h100?"),
    ):
        code, out, error = run(capsys, "profile", *arguments)
        assert code in (1, 2)
        assert out == ""
        assert told in error


def test_a_file_may_import_its_neighbours(model: Path) -> None:
    (model.parent / "neighbour_of_model.py").write_text("WIDTH = 8\n")
    model.write_text("from neighbour_of_model import WIDTH\n" + MODEL.replace("nn.Linear(4, 8)", "nn.Linear(4, WIDTH)"))
    layers = profile_file(load_model_file(str(model)), [2], Measuring("cpu"))[2]
    assert layers.num_layers == 3
    assert torch.get_default_device().type == "cpu"


LENGTHS = """
import torch
from torch import nn

def make_model():
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

def make_batch(rows, length=4):
    return torch.zeros(rows, length, dtype=torch.int64), torch.zeros(rows, length, 2)

def loss_fn(output, target):
    return (output - target).square().mean()
"""


def test_costs_by_length_are_fitted(tmp_path: Path, capsys: Capsys) -> None:
    path, output = tmp_path / "model.py", tmp_path / "sizes.json"
    path.write_text(LENGTHS)
    out = printed(capsys, "profile", path, "--lengths", "4,8,16", "--rows", "1,3", "--stages", "2", "-o", output)
    assert "differ from measured ones by at most" in out
    model = SizeModel.from_json(output.read_text())
    assert model.num_stages == 2
    assert model.boundary_bytes[0] == pytest.approx((0, 8 * 4, 0), abs=1e-6)  # a token is a row of 8 floats
    size = Size.padded([16] * 3)
    assert model.costs(size).boundary_bytes == (3 * 16 * 8 * 4,)
    for arguments, told in (
        (["--stages", "2"], "give --lengths as well"),
        (["--lengths", "4"], "two lengths or more"),
        (["--lengths", "4,8", "--cache", str(tmp_path)], "leave it out with --lengths"),
    ):
        assert told in refused(capsys, 2, "profile", path, *arguments)
