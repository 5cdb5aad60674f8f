"""`rota checkpoint ls`, `verify` and `export`."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from dist.checkpoint_runs import TWO, Training, model, refusal, save_model
from dist.pool import Pool
from rota.cli import main
from rota.runtime import checkpoint_files
from rota.runtime.checkpoint_files import Manifest


def cli(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["checkpoint", *map(str, arguments)])
    return code, *capsys.readouterr()


def save_twice(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    training = Training(TWO)
    with training.pipeline:
        checkpoints = training.checkpoints(folder)
        for step in range(2):
            training.steps(range(step, step + 1))
            checkpoints.save(step + 1, epoch=step)
    return {name: p.detach() for name, p in training.pipeline.named_parameters()}


def test_ls_verify_and_export(pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_rank = pool.run(2, save_twice, tmp_path)
    (tmp_path / "step-3.partial").mkdir()
    code, out, _ = cli(capsys, "ls", tmp_path)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["step-3.partial", "step-1", "step-2"]
    assert "2 ranks × 1  23 weights and buffers" in out
    assert "epoch=1" in out.splitlines()[-1]
    assert cli(capsys, "verify", tmp_path)[0] == 0
    assert cli(capsys, "verify", tmp_path / "step-1")[0] == 0

    exported = tmp_path / "model.safetensors"
    assert cli(capsys, "export", tmp_path, "-o", exported)[0] == 0
    loaded = model(seed=5)
    assert safetensors.torch.load_model(loaded, exported) == (set(), [])
    state = loaded.state_dict()
    for of_rank in by_rank:
        assert all(torch.equal(state[name], value) for name, value in of_rank.items())
    assert torch.equal(state["3.scale"], model().state_dict()["3.scale"])
    assert torch.equal(state["7.linear.weight"], state["0.linear.weight"])


def damage_file(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_verify_finds_every_damaged_and_missing_file(
    pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.run(2, save_twice, tmp_path)
    files = sorted((tmp_path / "step-2").iterdir())
    names = [file.name for file in files if file.name != "rota.json"]
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "plan.json", "training.pt"]
    for name in names:
        file = tmp_path / "step-2" / name
        whole = file.read_bytes()
        damage_file(file)
        code, out, err = cli(capsys, "verify", tmp_path)
        assert (code, "damaged: step-2;" in err) == (1, True)
        assert f"{name} has other contents than when it was saved" in out
        file.write_bytes(whole[:-1])
        assert f"{name} has {len(whole) - 1:,} bytes instead of" in cli(capsys, "verify", tmp_path / "step-2")[1]
        file.unlink()
        assert f"{name} is missing" in cli(capsys, "verify", tmp_path)[1]
        code, _, err = cli(capsys, "export", tmp_path, "-o", tmp_path / "model.safetensors")
        assert (code, f"{name} is missing; remove" in err) == (2, True)
        file.write_bytes(whole)
    assert cli(capsys, "verify", tmp_path)[0] == 0
    (tmp_path / "step-2" / "__1_0.distcp").unlink()
    told = pool.run(2, load_damaged, tmp_path)
    assert all("__1_0.distcp is missing; remove" in words for words in told)


def test_verify_finds_what_the_metadata_lack(pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool.run(2, save_model, tmp_path)
    path = tmp_path / "step-2" / "rota.json"
    text = path.read_text()
    for changed, told in (
        (text.replace('["0.linear.weight", 1]', '["0.linear.weight", 2]'), "0.linear.weight#1 has no tensor"),
        (text.replace('["1.scale", 1]', '["1.scale", 1], ["ghost", 1]'), "ghost has no tensor"),
        (
            "".join(line for line in text.splitlines(True) if "__1_0" not in line),
            "7.linear.bias is in none of its files",
        ),
    ):
        assert changed != text
        path.write_text(changed)
        code, out, _ = cli(capsys, "verify", tmp_path)
        assert (code, told in out) == (1, True)


def test_one_that_cannot_be_read_is_told_beside_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (5, 10, 15):
        partial = checkpoint_files.begin(tmp_path, step)
        saved = Manifest(step, step, {"note": "\x1b[2J"}, 2, 1, {"a": 1}, {}, {})
        checkpoint_files.publish(partial, saved, None)
    (tmp_path / "step-10" / "rota.json").write_text("{")
    (tmp_path / "step-15" / "rota.json").write_bytes(b"\xff")
    code, out, err = cli(capsys, "ls", tmp_path)
    assert (code, err) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert lines.keys() == {"step-5", "step-10", "step-15"}
    assert lines["step-5"].endswith(r'note="\u001b[2J"')
    assert lines["step-10"].startswith("unreadable: ")
    assert "not JSON" in lines["step-10"]
    assert "not a text file in UTF-8" in lines["step-15"]
    code, out, err = cli(capsys, "verify", tmp_path / "step-10")
    assert (code, "damaged: step-10" in err) == (1, True)


def load_damaged(rank: int, folder: Path) -> str:
    training = Training(TWO)
    with training.pipeline:
        return refusal(lambda: training.checkpoints(folder).load())


def test_the_command_line_says_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(capsys, "export", tmp_path)[::2] == (2, "rota checkpoint: error: export needs -o FILE\n")
    assert cli(capsys, "ls", tmp_path, "-o", "x")[0] == 2
    code, _, err = cli(capsys, "verify", tmp_path)
    assert (code, f"no whole checkpoint in {tmp_path}" in err) == (2, True)
