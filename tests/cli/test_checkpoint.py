"""`rota checkpoint ls`, `verify` and `export`."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

from cli.test_cli import Capsys
from rota.cli import main
from rota.runtime.checkpoints import checkpoint_folder
from rota.runtime.checkpoints.saved import File, Manifest, damage, digest, read_saved
from support.checkpoint_runs import TWO, Training, model, save_model, stored
from support.pool import Pool

FILE = File(3, "", ())  # which is not there


def cli(capsys: Capsys, *arguments: object) -> tuple[int, str, str]:
    code = main(["checkpoint", *map(str, arguments)])
    return code, *capsys.readouterr()


def save_twice(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    with Training(TWO) as training:
        checkpoints = training.checkpoints(folder)
        for step in range(2):
            training.steps(range(step, step + 1))
            checkpoints.save(step + 1, epoch=step, seen=[*range(99)])
    return {name: p.detach() for name, p in training.pipeline.named_parameters()}


def test_ls_verify_and_export(pool: Pool, tmp_path: Path, capsys: Capsys) -> None:
    by_rank = pool.run(2, save_twice, tmp_path)
    code, out, _ = cli(capsys, "ls", tmp_path)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["step-1", "step-2"]
    assert "2 ranks × 1 replica  23 weights and buffers" in out
    assert out.splitlines()[-1].endswith(f"epoch=1, seen={json.dumps([*range(99)])}")
    assert cli(capsys, "verify", tmp_path)[0] == 0
    assert cli(capsys, "verify", tmp_path / "step-1")[0] == 0

    listed = json.loads(cli(capsys, "ls", tmp_path, "--json")[1])
    assert [(one["name"], one["extra"]) for one in listed["checkpoints"]] == [
        (f"step-{step + 1}", {"epoch": step, "seen": [*range(99)]}) for step in range(2)
    ]
    assert json.loads(cli(capsys, "verify", tmp_path, "--json")[1])["damages"] == {"step-1": [], "step-2": []}

    exported = tmp_path / "model.safetensors"
    code, out, _ = cli(capsys, "export", tmp_path, "-o", exported, "--json")
    assert (code, json.loads(out)["num_tensors"]) == (0, 23)
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


def test_verify_finds_every_damaged_and_missing_file(pool: Pool, tmp_path: Path, capsys: Capsys) -> None:
    pool.run(2, save_twice, tmp_path)
    files = sorted((tmp_path / "step-2").iterdir())
    names = [file.name for file in files if file.name != "rota.json"]
    assert names == ["rank-0.safetensors", "rank-1.safetensors"]
    for name in names:
        file = tmp_path / "step-2" / name
        whole = file.read_bytes()
        damage_file(file)
        code, out, err = cli(capsys, "verify", tmp_path)
        assert (code, "damaged: step-2;" in err) == (1, True)
        assert f"{name}: it has changed since it was saved, in " in out
        file.write_bytes(whole[:-1])
        assert f"{name}: it has {len(whole) - 1:,} bytes instead of" in cli(capsys, "verify", tmp_path / "step-2")[1]
        file.unlink()
        assert f"{name} is missing" in cli(capsys, "verify", tmp_path)[1]
        code, _, err = cli(capsys, "export", tmp_path, "-o", tmp_path / "model.safetensors")
        assert (code, f"{name} is missing; remove" in err) == (2, True)
        file.write_bytes(whole)
    (tmp_path / "step-2" / "README").touch()  # of a user
    assert cli(capsys, "verify", tmp_path)[0] == 0


def write_signed(path: Path, manifest: str) -> None:
    """Give a manifest the hash that belongs to it."""
    document = json.loads(manifest)
    del document["sha256"]
    path.write_text(json.dumps({**document, "sha256": digest(document)}))


def test_verify_finds_what_does_not_belong_together(pool: Pool, tmp_path: Path, capsys: Capsys) -> None:
    pool.run(2, save_model, tmp_path)
    path = tmp_path / "step-2" / "rota.json"
    text = path.read_text()
    for was, becomes, told in (
        ('"1.scale"', '"1.scale", "ghost"', '"model/ghost" has no tensor'),
        ('    "1.scale",\n', "", '"model/1.scale" is a tensor that nothing uses'),
    ):
        assert was in text
        write_signed(path, text.replace(was, becomes))
        code, out, _ = cli(capsys, "verify", tmp_path)
        assert (code, told in out) == (1, True), out
        path.write_text(text.replace(was, becomes))
        assert "it has changed since it was saved" in cli(capsys, "verify", tmp_path)[1]


@pytest.mark.parametrize(
    ("was", "becomes", "told"),
    [
        ("[6, 6], [0, 0], [6, 6]]", "[6, 7], [0, 0], [6, 6]]", "no parts cover "),
        ("[6, 6], [0, 0], [6, 6]]", "[6, 6], [1, 0], [6, 6]]", "expected offsets and sizes inside of the tensor"),
        ("[6, 6], [0, 0], [6, 6]]", "[6, 6], [0, 0], [5, 6]]", "its tensors do not fill"),
        ('"F64"', '"F32"', "its tensors do not fill"),
        ('"F64"', '"Tensor"', "expected a dtype that safetensors has"),
    ],
)
def test_a_header_that_is_wrong_is_told(saved_model: Path, tmp_path: Path, was: str, becomes: str, told: str) -> None:
    """Even if all of its parts fit together, and the index has the digest that belongs to it."""
    folder = Path(shutil.copytree(saved_model / "step-2", tmp_path / "step-2"))
    manifest = json.loads((folder / "rota.json").read_text())
    path = folder / "rank-1.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    own = header["__metadata__"]["tensors"]
    assert was in own
    header["__metadata__"]["tensors"] = own.replace(was, becomes, 1)
    text = json.dumps(header).encode()
    head = len(text).to_bytes(8, "little") + text
    path.write_bytes(head + data[end:])
    manifest["files"][1][:2] = [path.stat().st_size, hashlib.sha256(head).hexdigest()]
    write_signed(folder / "rota.json", json.dumps(manifest))
    assert told in (damage(read_saved(folder)) or "")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_other_readers_read_the_same(saved_model: Path) -> None:
    """PyTorch's reader of safetensors in parts, and safetensors itself, which checks that nothing is left over."""
    tensors, _ = stored(saved_model / "step-2")
    found = {key: torch.empty_like(tensor) for key, tensor in tensors.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(saved_model / "step-2")))
    assert all(torch.equal(found[key], tensor) for key, tensor in tensors.items())


@pytest.fixture(scope="module")
def saved_model(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pool.run(2, save_model, folder := tmp_path_factory.mktemp("saved"))
    return folder


def test_one_that_cannot_be_read_is_told_beside_the_others(tmp_path: Path, capsys: Capsys) -> None:
    for step in (5, 10, 15):
        partial = checkpoint_folder.begin(tmp_path, step)
        saved = Manifest(step, step, {"note\x1b[2J": "\x1b[2J"}, 2, 1, ("a",), {}, (FILE,), None)
        (partial / "rota.json").write_text(saved.to_json())
        partial.rename(partial.with_suffix(""))
    (tmp_path / "step-10" / "rota.json").write_text("{")
    (tmp_path / "step-15" / "rota.json").write_bytes(b"\xff")
    code, out, err = cli(capsys, "ls", tmp_path)
    assert (code, err) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert lines.keys() == {"step-5", "step-10", "step-15"}
    assert lines["step-5"].endswith(r'note\x1b[2J="\u001b[2J"')
    assert lines["step-10"].startswith("unreadable: ")
    assert "not JSON" in lines["step-10"]
    assert "text file in UTF-8" in lines["step-15"]
    code, out, err = cli(capsys, "verify", tmp_path / "step-10")
    assert (code, "damaged: step-10" in err) == (1, True)


def test_names_of_folders_cannot_move_the_cursor(tmp_path: Path, capsys: Capsys) -> None:
    partial = checkpoint_folder.begin(tmp_path, 1)
    (partial / "rota.json").write_text(Manifest(1, 1, {}, 2, 1, ("a",), {}, (FILE,), None).to_json())
    partial.rename(partial.with_suffix(""))
    for action in ("ls", "verify"):
        code, out, err = cli(capsys, action, tmp_path)
        assert (out + err).replace("\n", "").isprintable()
    code, out, err = cli(capsys, "ls", tmp_path / "\x1b[2J")
    assert (code, r"no whole checkpoint in" in err, "\x1b" in err) == (2, True, False)


@pytest.mark.parametrize("name", ["rota.json", "rank-0.safetensors"])
def test_what_is_no_file_is_refused_unopened(saved_model: Path, tmp_path: Path, capsys: Capsys, name: str) -> None:
    """A pipe that nobody writes to would be waited for; a device may never end; a link may lead to a user's secrets."""
    folder = Path(shutil.copytree(saved_model / "step-2", tmp_path / "step-2"))
    (folder / name).rename(elsewhere := tmp_path / "elsewhere")
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(elsewhere)):
        make(folder / name)
        for action in ("ls", "verify"):
            code, out, err = cli(capsys, action, tmp_path)
            told = f"{name} is not a regular file" in out
            assert (code, told) == (action == "verify", action == "verify" or name == "rota.json"), out + err
        code, _, err = cli(capsys, "export", tmp_path, "-o", tmp_path / "model.safetensors")
        assert (code, f"{name} is not a regular file" in err, err.count("\n")) == (2, True, 1)
        (folder / name).unlink()


def test_export_tells_all_that_can_go_wrong(saved_model: Path, tmp_path: Path, capsys: Capsys) -> None:
    exported = tmp_path / "model.safetensors"
    for folder in (tmp_path / "nowhere", tmp_path, saved_model / "step-2" / "rota.json", "x" * 5000):
        code, out, err = cli(capsys, "export", folder, "-o", exported)
        assert (code, out, err.count("\n")) == (2, "", 1)
    shutil.copytree(saved_model, folder := tmp_path / "with an old one")
    (folder / "step-1").mkdir()
    (folder / "step-1" / "rota.json").write_text('{"rota": "checkpoint", "format": 1}')
    code, out, err = cli(capsys, "export", folder, "-o", exported)
    assert (code, "it was saved by an earlier version of Rota" in err) == (0, True)
    assert exported.exists()
