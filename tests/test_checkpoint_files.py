"""The folder of checkpoints, and the state of optimizers and schedulers by weight; no processes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.optim import lr_scheduler

from rota import FormatError, PipelineError
from rota.runtime import checkpoint_files as files
from rota.runtime.checkpoint_files import File, Manifest
from rota.runtime.checkpoint_metadata import read_metadata
from rota.runtime.checkpoint_optimizer import (
    records_of,
    require_records,
    restore_optimizer,
    restore_scheduler,
    same,
    split_scheduler,
)
from rota.runtime.checkpoint_state import random_state
from rota.runtime.checkpoints import _read_training, _training_file


def manifest(number: int, step: int, **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "extra": {"position": [3, None, {"a": 0.5}]},
        "num_ranks": 2,
        "num_replicas": 1,
        "weights": {"a.weight": 1, "b": 4},
        "aliases": {"c": "b"},
        "files": {"data": File(3, "ab" * 32)},
    }
    return Manifest(number=number, step=step, **{**fields, **changes})


def save(folder: Path, step: int, keep: int | None = None) -> None:
    partial = files.begin(folder, step)
    (partial / "data").write_bytes(b"abc")
    files.publish(partial, manifest(files.next_number(folder), step), keep)


def steps_in(folder: Path) -> list[int]:
    return [saved.manifest.step for saved in files.whole_ones(folder)]


def test_a_manifest_comes_back_as_it_was() -> None:
    assert Manifest.from_json((whole := manifest(3, 20)).to_json()) == whole


@pytest.mark.parametrize(
    ("was", "becomes", "told"),
    [
        ('"format": 1', '"format": 2', "checkpoint.format is 2; expected 1; read it with the version of Rota"),
        ('"step": 20', '"step": -1', "checkpoint.step is -1; expected 0 or more"),
        ('["b", 4]', '["b", 0]', "checkpoint.weights[1][1] is 0; expected 1 or more"),
        ('["b", 4]', '["b"]', 'checkpoint.weights[1] is ["b"]; expected a pair'),
        ('"aliases": {"c": "b"}', '"aliases": []', "checkpoint.aliases is []; expected an object"),
        ('"number"', '"numbers"', "checkpoint has no field 'number'"),
        ('"rota": "checkpoint"', '"rota": "plan"', 'it says "rota": "plan"'),
        ('["b", 4]', '["a.weight", 4]', 'checkpoint.weights[1][0] is "a.weight"; expected another name than those'),
        ('{"c": "b"}', '{"c": 3}', "checkpoint.aliases.c is 3; expected a text"),
        ('["data"', '["../../data"', "checkpoint.files[0][1]: '../../data' is no file of the checkpoint's own folder"),
        ('["data"', '["/etc/passwd"', "'/etc/passwd' is no file of the checkpoint's own folder"),
        ('["data"', '[""', 'checkpoint.files[0][0] is ""; expected a name of 1 to 1,000 printable characters'),
        ('["data"', r'["\u001b[2J"', r'checkpoint.files[0][0] is "\u001b[2J"; expected a name of 1 to 1,000'),
        ('"abab', '"ABab', "expected a SHA-256 in 64 hexadecimal digits"),
    ],
)
def test_a_wrong_manifest_is_told_by_file_and_field(tmp_path: Path, was: str, becomes: str, told: str) -> None:
    save(tmp_path, 20)
    path = tmp_path / "step-20" / "rota.json"
    text = path.read_text()
    assert was in text
    path.write_text(text.replace(was, becomes))
    with pytest.raises(FormatError) as error:
        files.whole_ones(tmp_path)
    assert str(path) in str(error.value)
    assert told in str(error.value)


def test_the_newest_is_the_one_saved_last(tmp_path: Path) -> None:
    for step in (10, 9, 100, 10):
        save(tmp_path, step)
    assert steps_in(tmp_path) == [9, 100, 10]
    save(tmp_path, 1, keep=2)
    assert steps_in(tmp_path) == [10, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-10"]


class PowerCut(Exception):
    pass


@pytest.mark.parametrize("num_done", range(7))
def test_a_cut_at_any_point_leaves_a_whole_one_of_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_done: int
) -> None:
    """`num_done` of the renames and removals of the second save are done; then the power is cut."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    left = num_done

    def counted(function: Any) -> Any:
        def act(*args: Any) -> Any:
            nonlocal left
            if left == 0:
                raise PowerCut
            left -= 1
            return function(*args)

        return act

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", counted(Path.rename))
        patch.setattr(files.shutil, "rmtree", counted(files.shutil.rmtree))
        patch.setattr(files, "write_synced", counted(files.write_synced))
        try:
            save(tmp_path, 2, keep=1)
            finished = True
        except PowerCut:
            finished = False
    assert finished is (num_done >= 6)
    files.mend(tmp_path)
    assert steps_in(tmp_path)[-1] == 2
    assert {path.name for path in tmp_path.iterdir()} == {f"step-{step}" for step in steps_in(tmp_path)}
    save(tmp_path, 3, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


def test_a_folder_without_manifest_is_not_whole_and_stays(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-x").mkdir()
    assert steps_in(tmp_path) == [1]
    assert [path.name for path in files.unfinished_ones(tmp_path)] == ["step-2", "step-x"]
    save(tmp_path, 2)
    assert steps_in(tmp_path) == [1, 2]


# --- optimizers and schedulers ----------------------------------------------------------------------------------------


class Halving:
    """A schedule with a state of its own, as `LambdaLR` takes it."""

    def __init__(self, every: int) -> None:
        self.every = every

    def __call__(self, step: int) -> float:
        return 0.5 ** (step // self.every)


SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, [Halving(1), Halving(2)]),
    "steps": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.2], total_steps=10),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, [0.01, 0.02], [0.1, 0.2], step_size_up=3),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, min_lr=[0.001, 0.002]),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1, 2), lr_scheduler.CosineAnnealingLR(o, 10)], [2]
    ),
}


class Setup:
    """Two weights, each in a group of its own; the groups may be the other way round."""

    def __init__(self, scheduler: str, named: bool = False) -> None:
        torch.manual_seed(0)
        self.weights = {name: nn.Parameter(torch.randn(3, dtype=torch.bfloat16)) for name in ("a", "b")}
        groups: list[dict[str, Any]] = [
            {"params": [(name, weight)] if named else [weight], "lr": lr, "weight_decay": 0.01}
            for (name, weight), lr in zip(self.weights.items(), (0.05, 0.1), strict=True)
        ]
        self.optimizer = torch.optim.SGD(groups, momentum=0.9)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.keys = {weight: name for name, weight in self.weights.items()}

    def train(self, steps: range) -> list[Any]:
        for step in steps:
            for weight in self.weights.values():
                weight.grad = torch.full((3,), 0.1 * step, dtype=torch.bfloat16)
            self.optimizer.step()
            metric = (1.0,) if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau) else ()
            self.scheduler.step(*metric)
        return [{**group, "params": [p.tolist() for p in group["params"]]} for group in self.optimizer.param_groups]


def through_a_file(folder: Path, scheduler: Any, records: Any) -> tuple[Any, Any]:
    """As `save` writes and `load` reads them: without running what a pickle names."""
    training = {"scheduler": scheduler, "records": records, "random": random_state()}
    (folder / files.TRAINING).write_bytes(_training_file(training))
    read = _read_training(folder)
    assert same(read["random"], training["random"])
    return read["scheduler"], read["records"]


class Named:
    """Of a class that nobody else knows."""


class Running:
    """Runs when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_what_would_run_code_is_neither_written_nor_read(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"hold what is neither a number, a text nor a tensor, .* take it out of"):
        _training_file({"scheduler": Named(), "records": {}, "random": None})
    trap = Running(tmp_path / "ran")
    torch.save({"scheduler": trap, "records": {}, "random": None}, tmp_path / files.TRAINING)
    with pytest.raises(FormatError, match=r"training.pt cannot be read .* was not written by rota.Checkpoints"):
        _read_training(tmp_path)
    for made in (trap, Metadata({"a": BytesStorageMetadata()}), Metadata({}, storage_data={"a": trap}), ["a"], 3):
        (tmp_path / files.METADATA).write_bytes(pickle.dumps(made))
        with pytest.raises(
            FormatError, match=r"\.metadata: it .*; it was not written by rota.Checkpoints, do not use it"
        ):
            read_metadata(tmp_path)
    outside = Metadata({}, storage_data={"a": _StorageInfo("../__0_0.distcp", 0, 1)})
    (tmp_path / files.METADATA).write_bytes(pickle.dumps(outside))
    with pytest.raises(FormatError, match=r"places a tensor in '../__0_0.distcp', outside of the checkpoint's folder"):
        read_metadata(tmp_path)
    (tmp_path / files.METADATA).write_bytes(pickle.dumps(outside)[:-9])
    with pytest.raises(FormatError, match=r"\.metadata cannot be read .* the checkpoint is damaged"):
        read_metadata(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_of_every_kind_go_on(scheduler: str, tmp_path: Path) -> None:
    before, after = Setup(scheduler), Setup(scheduler)
    before.train(range(3))
    records, tensors = records_of(before.optimizer, before.scheduler, before.keys)
    saved, by_group = split_scheduler(before.scheduler, 2)
    assert by_group
    saved, records = through_a_file(tmp_path, saved, records)
    for name, weight in before.weights.items():
        after.weights[name].data.copy_(weight)
    restore_optimizer(after.optimizer, after.keys, records, {key: value.clone() for key, value in tensors.items()})
    restore_scheduler(after.scheduler, saved, require_records(after.optimizer, after.keys, records))
    assert same(after.scheduler.state_dict(), before.scheduler.state_dict())
    assert same(after.train(range(3, 8)), before.train(range(3, 8)))


def test_state_keeps_its_dtype_and_groups_their_names() -> None:
    before, after = Setup("steps"), Setup("steps", named=True)
    before.train(range(2))
    state = before.optimizer.state[before.weights["a"]]
    state["master"] = torch.randn(3)  # a float32 copy, as mixed-precision optimizers keep it
    state["count"] = 7
    records, tensors = records_of(before.optimizer, before.scheduler, before.keys)
    restore_optimizer(after.optimizer, after.keys, records, tensors)
    assert same(dict(after.optimizer.state[after.weights["a"]]), dict(state))
    assert [group["param_names"] for group in after.optimizer.param_groups] == [["a"], ["b"]]


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (float("nan"), float("nan"), True),
        (0.1, 0.2, False),
        (1, 1.0, False),
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.ones(2).double(), False),
        ({"a": [1, (2, 3)]}, {"a": [1, (2, 3)]}, True),
        ({"a": [1, (2, 3)]}, {"a": [1, (2, 4)]}, False),
        ({"a": None}, {}, False),
    ],
)
def test_same(a: Any, b: Any, equal: bool) -> None:
    assert same(a, b) is equal
