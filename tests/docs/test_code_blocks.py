"""The code blocks of the docs run."""

import ast
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import pyplot

from rota import Cluster, Costs, PlanError, place
from rota.core.programs.device_order import prove
from rota.core.programs.device_steps import device_programs
from rota.models.sequence_chunks import Chunk
from rota.schedules import one_f_one_b
from support import ROOT
from support.device_orders import with_early_receives
from support.pages import python_blocks, run, text_of

pytestmark = pytest.mark.usefixtures("time_is_work")

Told = Callable[..., str]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    """Runs a block of a page, and returns what it prints."""

    def run_block(page: str, number: int = 0, space: dict[str, Any] | None = None) -> str:
        run(page, number, space)
        return capsys.readouterr().out

    return run_block


def test_your_own_schedule_of_the_docs_runs(told: Told) -> None:
    blocks = python_blocks("own-schedule.md")
    assert len(blocks[0].splitlines()) <= 27
    for number, least_us in (0, (8 + 3) * 300 - 3 * 300), (1, 2 * 600 + 100):
        assert int(told("own-schedule.md", number)) >= least_us
    with pytest.raises(PlanError, match="wait in a cycle"):
        exec(blocks[1].replace("3F0 3B0", "3B0 3F0"), {"__name__": "example"})


def test_the_plans_for_a_memory_of_the_docs_run(told: Told) -> None:
    space: dict[str, Any] = {}
    peak, makespan_us, gap = told("memory.md", 0, space).split()
    assert int(peak) <= 10_000
    assert int(makespan_us) >= 24_000
    assert float(gap.rstrip("%")) <= 10
    kept_us, offloaded_us = map(int, told("memory.md", 1, space).split())
    assert 2_575_000 <= offloaded_us < kept_us
    assert told("memory.md", 2, space).startswith("rank 0 would hold 12 kB")


def test_the_plans_of_micro_batches_that_differ_in_the_docs_run(told: Told) -> None:
    space: dict[str, Any] = {}
    makespan_us = int(told("variable-batches.md", 0, space).split()[0])
    assert told("variable-batches.md", 2, space).count("these micro-batches in") == 2
    for found in (space["kept"], space["free"]):
        assert found.bound_us <= found.makespan_us <= makespan_us
    assert int(told("variable-batches.md", 1, space)) == 174


def test_the_search_of_the_docs_runs(told: Told) -> None:
    printed = told("search.md", 0)
    assert printed.startswith("2700 2700 0.0\n")
    assert "proven optimal" in printed
    assert [line.split()[1] for line in told("search.md", 1).splitlines()[1:]] == ["16.0", "8.0", "5.3", "4.0"]
    assert told("search.md", 2) == "4 36\n1000\n"


def test_the_profiles_of_the_docs_are_made(told: Told) -> None:
    space: dict[str, Any] = {}
    told("profiling.md", 0, space)
    printed = told("profiling.md", 1, space).splitlines()
    lines = printed[:7] + printed[-1:]  # a busy machine is measured again
    assert lines[6].startswith("layer 7 of 7 (6): F ")
    assert lines[7].startswith("('3',) (")
    times, kept = told("profiling.md", 2, space).split(") (")
    assert times == "(3421, 3421, 3421, 3421"
    assert kept == "0, 134217728, 134217728, 134217728)\n"  # the first layer's input is the batch


@pytest.mark.parametrize(("system", "expected"), [("Tessel", "4 36\n524\n"), ("René", "34.6\n")])
def test_the_code_for_an_earlier_system_runs(
    system: str, expected: str, told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert told(f"coming-from-earlier-systems.md#{system}").endswith(expected)
    pyplot.close("all")


def test_the_explanation_of_the_docs_runs(told: Told) -> None:
    lines = told("explain.md#Why is a rank idle?").splitlines()
    assert any("stage 3 takes 27% longer than the mean: move 60 µs" in line for line in lines)
    assert lines[-3].startswith("0 400 ")


def test_the_truth_of_the_docs_is_predicted(told: Told) -> None:
    lines = told("explain.md#Predicted vs. measured").splitlines()
    parts = {line[2:18].strip(): line.split()[-1] for line in lines if " µs   (" in line}
    assert parts
    assert all(f"\n| {part} |" in text_of("explain.md") for part in parts)
    assert lines[-1] == "0"
    assert any(line.startswith("Use ") for line in lines)


def test_the_pictures_of_the_docs_are_made(told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert told("explain.md#Pictures and pages") == "True\n"
    assert (tmp_path / "1f1b.svg").read_text().startswith("<?xml")


def test_the_plan_of_the_docs_is_found(told: Told) -> None:
    lines = told("autoplan.md").splitlines()
    assert "rows/s" in lines[0]
    assert any(line.startswith("▸") for line in lines)
    assert lines[-1].startswith("('cuts[")
    assert lines[-1].endswith(" 1 1")


def test_stages_made_by_hand_have_the_names_of_the_docs(told: Told) -> None:
    assert told("checkpoints.md", 1).startswith("layers.0.weight layers.0.bias layers.1.weight ")


def test_a_pretrained_folder_loads_as_the_docs_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made, *_ = python_blocks("memory.md#Models larger than a machine's memory")
    space: dict[str, Any] = {}
    exec(made[: made.index("plan, mesh =")], space)
    run("memory.md#Models larger than a machine's memory", 1, space)  # with an init of one's own
    assert not any(space["layers"][place].bias.any() for place in (2, 3))
    assert space["layers"][0].weight.is_meta
    model = space["LlamaForCausalLM"](space["CONFIG"])
    model.save_pretrained("pretrained")
    run("memory.md#Models larger than a machine's memory", 2, space)
    stages = space["stages"]
    assert all(torch.equal(parameter, model.get_parameter(name)) for name, parameter in stages[1].named_parameters())
    assert stages[0].get_parameter("model.embed_tokens.weight").is_meta


def test_the_install_line_of_the_readme_brings_what_its_example_imports() -> None:
    readme = text_of(ROOT / "README.md")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    install = re.search(r"^    pip install '\.\[([\w,]+)\]'", readme, flags=re.MULTILINE)
    installed, asked = {"rota", "model"}, install[1].split(",")  # model.py is the example's own
    for extra in asked:
        for requirement in project["optional-dependencies"][extra]:
            name, more = re.match(r"([\w-]+)(?:\[([\w,]+)\])?", requirement).groups()  # type: ignore[union-attr]
            installed.add(name)
            asked += (more or "").split(",") if name == "rota" else []
    imported = {
        name.partition(".")[0]
        for block in python_blocks(ROOT / "README.md")
        for node in ast.walk(ast.parse(block))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert "transformers" in imported
    assert imported - set(sys.stdlib_module_names) <= installed


def test_the_verification_of_the_docs_runs(told: Told) -> None:
    space: dict[str, Any] = {}
    assert told("verify.md", 0, space).startswith("exact\n")
    assert told("verify.md", 1, space).startswith("BatchNorm1d '1' takes its statistics over the rows of a micro-batch")


def test_the_device_order_of_the_docs_is_proved(told: Told) -> None:
    space: dict[str, Any] = {}
    # 4 ranks: 64 ops, 48 messages with two sides each, 4 reductions; each of 3 pairs has two channels.
    assert told("accelerators.md", 0, space) == "164 kernels on 6 channels have no cycle of waits\n"
    lines = told("accelerators.md", 1, space).splitlines()
    assert len(lines) == 8
    assert lines[1].split() == ["channel", "0→1", "receive", "0F0→1F0", "waits", "for", "steps", "[0]"]


def test_the_refusal_of_the_docs_is_what_the_proof_says() -> None:
    plan = one_f_one_b(place(Costs.uniform(2, 10, 20), Cluster.uniform(2)), 3)
    with pytest.raises(PlanError) as caught:
        prove([with_early_receives(program) for program in device_programs(plan)])
    assert str(caught.value) in " ".join(text_of("accelerators.md").split())


def test_the_batch_of_the_docs_is_planned(told: Told) -> None:
    space: dict[str, Any] = {}
    assert told("variable-batches.md", 3, space).startswith("7 samples in ")
    assert sorted(i for group in space["found"].groups for i in group) == [*range(7)]


def test_the_attention_of_the_docs_runs_in_chunks() -> None:
    space: dict[str, Any] = {}
    run("variable-batches.md", -1, space)
    attention, x = space["Attention"](8, 2), torch.randn(3, 7, 8)
    with Chunk() as first:
        begin = attention(x[:, :3])
    with Chunk(3, [first.passed_on()]):
        rest = attention(x[:, 3:])
    torch.testing.assert_close(torch.cat([begin, rest], 1), attention(x))
