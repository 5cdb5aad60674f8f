"""The scripts of pages train by the commands of their page, as the page says."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rota
from cli.test_run import rota as rota_command
from support.commands import output_of
from support.pages import commands, python_blocks, run, text_of
from support.pool import Pool

pytestmark = pytest.mark.dist

# What makes the tutorial's training smaller and shorter.
SMALLER = {"WIDTH, NUM_BLOCKS, VOCABULARY = 64, 192, 8, 1024": "WIDTH, NUM_BLOCKS, VOCABULARY = 64, 48, 4, 256"}
FEWER = {'glob("*.py"))': 'glob("*.py"))[:3]', "range(1, 41)": "range(1, 21)"}


def outputs(pool: Pool, folder: Path, page: str) -> list[str]:
    """What each command of the page prints, with its first block as the script."""
    (folder / "train.py").write_text(python_blocks(page)[0])
    return [output_of(pool, folder, command) for command in commands(page)]


def losses_in(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"(?<=loss )[\d.]+", printed)]


def test_precision(pool: Pool, tmp_path: Path) -> None:
    *_, told = outputs(pool, tmp_path, "precision.md")
    loss, scale = re.fullmatch(r"loss (\S+), norm \S+, scale (\S+)\n", told).groups()  # type: ignore[union-attr]
    assert float(loss) < 3.0
    assert float(scale) == 4096


def test_the_unet_of_the_page_on_unmodified_models_is_cut() -> None:
    space: dict[str, Any] = {"rota": rota, "torch": torch}
    run("huggingface.md", 1, space)
    carried = [(one.source, one.target, one.name) for one in space["stages"].carried]
    skips = [(at, at + 1, name) for at in (0, 1) for name in ("down.0", "down.1")]
    assert carried == [*skips, (1, 2, "up.0")]
    x = torch.randn(2, 3, 12, 12)
    assert torch.equal(space["stages"].run(x), space["unet"](x))


@pytest.mark.sweep  # test_examples trains such a model too
def test_an_unmodified_model_prints_what_its_page_says(pool: Pool, tmp_path: Path) -> None:
    *_, printed = outputs(pool, tmp_path, "huggingface.md")
    (said,) = re.findall(r"```text\n(.*?)```", text_of("huggingface.md"), flags=re.DOTALL)
    assert re.sub(r"(?<=loss )[\d.]+", "", printed) == re.sub(r"(?<=loss )[\d.]+", "", said)
    losses = losses_in(printed)
    assert losses == pytest.approx(losses_in(said), abs=0.1)
    assert losses[-1] < 0.7 * losses[0]


def test_data(tmp_path: Path) -> None:
    """In processes of its own, since those of the pool may not start the loader's workers."""
    (tmp_path / "train.py").write_text(python_blocks("data.md#Data")[0])
    *_, done = [rota_command(tmp_path, *command.split()[1:]) for command in commands("data.md#Data")]
    assert done.returncode == 0, done.stderr
    (loss,) = losses_in(done.stdout)
    assert loss < 0.35


def test_only_what_is_read_is_loaded() -> None:
    given: list[Any] = []
    pipeline = SimpleNamespace(reads_inputs=True, reads_targets=False, step=lambda *batch: given.append(batch))
    run("data.md#Data", 1, {"pipeline": pipeline, "load_inputs": lambda: 1, "load_targets": lambda: 1 / 0})
    assert given == [(1, None)]


def test_losses(pool: Pool, tmp_path: Path) -> None:
    """The page's script in two processes, and its fragment in a loop on the unsplit model."""
    *_, told = outputs(pool, tmp_path, "data.md#Losses and metrics")
    loss, accuracy = re.findall(r"^loss (\S+), accuracy (\S+)%$", told, flags=re.MULTILINE)[0]
    script, _, steps, fragment, _ = python_blocks("data.md#Losses and metrics")
    begin, loop = script.split("    for step in range(30):\n")
    end = loop[loop.index("    if pipeline.rank == 0:") :]
    batches = "    batches = [(tokens, labels)] * 30\n"
    (tmp_path / "train.py").write_text(begin + batches + indent(steps + "loss = handle.wait()\n", "    ") + end)
    *losses, last = output_of(pool, tmp_path, commands("data.md#Losses and metrics")[-1]).splitlines()
    assert last in told  # the same loss and accuracy
    assert len([line for line in losses if line.startswith("loss")]) == 29
    space: dict[str, Any] = {"__name__": "example"}
    exec(script.split("plan = rota.given_plan()")[0], space)
    optimizer = torch.optim.AdamW(space["model"].parameters(), lr=1e-2)
    for _ in range(30):
        exec(fragment, space)
        optimizer.step()
        optimizer.zero_grad()
    assert float(loss) == pytest.approx(space["loss"].item(), abs=2e-3)
    right, count = space["loss_fn"](space["output"], space["labels"])["accuracy"]
    assert float(accuracy) == pytest.approx(100 * (right / count).item(), abs=0.6)


@pytest.mark.sweep  # test_run runs the same commands as the README has them
def test_the_tutorial(pool: Pool, tmp_path: Path) -> None:
    model, train = python_blocks("tutorial.md")
    for old, new in (SMALLER | FEWER).items():
        assert (model + train).count(old) == 1
        model, train = model.replace(old, new), train.replace(old, new)
    (tmp_path / "model.py").write_text(model)
    (tmp_path / "train.py").write_text(train)
    # Instead of autoplan's plan, which takes a minute.
    output_of(pool, tmp_path, "rota plan 1f1b --ranks 2 --microbatches 8 -o plan.json")
    verify, running, explain = (commands("tutorial.md", f"rota {word}")[0] for word in ("verify", "run", "explain"))
    assert "exact" in output_of(pool, tmp_path, verify)
    first, last = losses_in(output_of(pool, tmp_path, running.replace("--timeline measured.json ", "")))
    assert last < first
    output_of(pool, tmp_path, "rota show plan.json --timeline measured.json")
    assert "Causes, summed over all ranks" in output_of(pool, tmp_path, explain)


@pytest.mark.sweep
def test_a_cluster(tmp_path: Path) -> None:
    """On two "nodes" of this machine."""
    (script,) = (block for block in python_blocks("cluster.md") if block.startswith("# train.py"))
    (tmp_path / "train.py").write_text(script)
    (planning,) = commands("cluster.md", "rota plan")
    subprocess.run([sys.executable, "-m", *planning.split()], cwd=tmp_path, check=True, capture_output=True)
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    running = next(line for line in commands("cluster.md", "torchrun") if "train.py" in line)
    words = running.replace("node0:29500", f"localhost:{port}").split()[1:]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", f"--rdzv-conf=is_host={int(node == 0)}", *words],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    try:
        told = [node.communicate(timeout=150)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], told
    assert [bool(re.search(r"^loss \d\.\d{4}$", text, flags=re.MULTILINE)) for text in told].count(True) == 1, told
