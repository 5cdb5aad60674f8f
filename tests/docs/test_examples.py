"""Each example trains as the commands in its docstring say."""

import ast
import re
from pathlib import Path

import pytest

from support import ROOT
from support.commands import output_of
from support.pool import Pool
from support.sampling import swept

#: On four processes as on one, with equal losses.
COMPARED = ["bidirectional", "hf_gpt2", "image_text", "resnet_digits", "vocabulary_parallel_gpt"]
#: Unmodified models on real data; the number of steps is an argument.
FALLING = {"encoder_decoder": 0.5, "finetune_lora": 0.95, "pretrain_llama": 0.9}


def commands(name: str) -> list[str]:
    """Those of its docstring, one per line; what they do is behind some spaces."""
    told = ast.get_docstring(ast.parse((ROOT / "examples" / f"{name}.py").read_text())) or ""
    lines = [re.split(r" {3,}", line)[0] for line in told.splitlines()]
    return [line for line in lines if line.split()[:1] in (["python"], ["rota"], ["torchrun"])]


def with_path(command: str) -> str:
    return command.replace("examples/", f"{ROOT / 'examples'}/")


def losses_in(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\S+?)[,\n]", text)]


@pytest.mark.parametrize("name", COMPARED)
def test_several_processes_train_as_one_does(name: str, pool: Pool, tmp_path: Path) -> None:
    *_, on_one = outputs = [output_of(pool, tmp_path, with_path(command)) for command in commands(name)]
    assert commands(name)[-1] == f"python examples/{name}.py"
    losses = losses_in(on_one)
    assert len(losses) >= 10
    assert losses[-1] < 0.9 * losses[0]
    numbers, expected = ([float(n) for n in re.findall(r"\d+\.\d+", text)] for text in (outputs[-2], on_one))
    assert numbers == pytest.approx(expected, abs=2e-9)


@pytest.mark.parametrize("name", ["encoder_decoder", "pretrain_llama", swept("finetune_lora")])
def test_the_loss_falls(name: str, pool: Pool, tmp_path: Path) -> None:
    planning, running = commands(name)
    output_of(pool, tmp_path, planning)
    trainings = output_of(pool, tmp_path, f"{with_path(running)} 21").split("step 0: ")[1:]
    assert len(trainings) == (2 if name == "finetune_lora" else 1)
    for training in trainings:
        losses = losses_in(training)
        assert len(losses) == 3
        assert losses[-1] < FALLING[name] * losses[0]


def test_a_plan_is_searched_for_with_measured_times(pool: Pool, tmp_path: Path) -> None:
    planning, running = commands("adapting")
    output_of(pool, tmp_path, planning)
    adapted = output_of(pool, tmp_path, f"{with_path(running)} 10")
    quick = (
        (ROOT / "examples" / "adapting.py")
        .read_text()
        .replace("Layer(6), Layer(4), Layer(4)", "Layer(0), Layer(0), Layer(0)")
    )
    (tmp_path / "adapting.py").write_text(quick)
    unchanged = output_of(pool, tmp_path, f"{running.replace('examples/', '')} 100")
    assert len(re.findall(r"^(?:Use|Keep) ", adapted, re.MULTILINE)) == 3
    assert losses_in(adapted) == pytest.approx(losses_in(unchanged), abs=2e-9)
    assert losses_in(adapted)[-1] < 0.1 * losses_in(adapted)[0]


@pytest.mark.sweep
@pytest.mark.parametrize("model", ["causal", "t5"])
def test_texts_of_any_length_are_planned_batch_by_batch(model: str, pool: Pool, tmp_path: Path) -> None:
    planning, *running = commands("variable_lengths")
    output_of(pool, tmp_path, planning)
    (command,) = (one for one in running if one.endswith(model))
    told = output_of(pool, tmp_path, f"{with_path(command)} 2")
    difference = re.search(rf"{model}: gradients differ from the unsplit model's by (\S+) at most", told)
    assert float(difference[1]) < 1e-10
    assert len(re.findall(r"[\d,]+ tokens/s", told)) == 3
    assert re.search(r"predicted \d+\.\d+ s, measured \d+\.\d+ s", told)


@pytest.mark.sweep
def test_long_samples_train_in_chunks(pool: Pool, tmp_path: Path) -> None:
    planning, running = commands("sequence_chunks")
    output_of(pool, tmp_path, planning)
    told = output_of(pool, tmp_path, f"{with_path(running)} 128")
    differences = re.findall(r"gradients differ from the unsplit model's by (\S+) at most", told)
    assert len(differences) == 2
    assert all(float(difference) < 1e-10 for difference in differences)
    shares = [float(share) for share in re.findall(r"(\S+) of the planned peak", told)]
    assert len(shares) == 2
    assert max(shares) < 1.1  # shorter samples keep little beside what messages and losses hold


def test_every_example_is_tested_and_the_new_ones_are_short() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {
        *(*COMPARED, *FALLING, "adapting", "variable_lengths", "sequence_chunks"),
        "torchft_replicas",  # in tests/runtime/launching/test_torchft.py
    }
    for name in FALLING:
        assert (ROOT / "examples" / f"{name}.py").read_text().count("\n") <= 60
