"""The folder of checkpoints, and the state of optimizers and schedulers by weight; no processes."""

import json
import math
import os
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from rota import FormatError, PipelineError
from rota.core.reading import Field
from rota.runtime.checkpoints import checkpoint_folder
from rota.runtime.checkpoints.optimizer_state import (
    Group,
    WeightRecord,
    groups_of,
    require_records,
    restore_optimizer,
    scheduler_state,
    split_scheduler,
    tensor_key,
)
from rota.runtime.checkpoints.random_states import random_state
from rota.runtime.checkpoints.saved import Manifest
from rota.runtime.checkpoints.state import _state_tensors, read_training
from rota.runtime.checkpoints.tensors import Chunk, File, Part, chunks_of, write_file
from rota.runtime.checkpoints.values import from_json, same, to_json
from support.checkpoint_runs import TWO, Halving

CPU = torch.device("cpu")


def manifest(number: int, step: int, files: tuple[File, ...] = (File(3, "ab" * 32, (7,)),)) -> Manifest:
    position = {"position": [3, None, {"a": 0.5}]}
    plan = TWO.plan().to_fields()
    return Manifest(number, step, position, 2, 1, ("a.weight", "b"), {"c": "b"}, files, plan)


def training_json(step: int = 3) -> dict[str, Any]:
    """As a rank without an optimizer writes it."""
    state = {"groups": [], "scheduler": None, "random": msgspec.structs.asdict(random_state(CPU))}
    return {"step": step, "extra": {}, "newest_at_load": 0, **to_json(state, "state")}


def save(folder: Path, step: int, keep: int | None = None) -> None:
    partial = checkpoint_folder.begin(folder, step)
    data = chunks_of({"model/a.weight": torch.ones(2), "model/b": torch.ones(3)})
    files = (write_file(partial / "rank-0.safetensors", data, training_json(step)),)
    checkpoint_folder.publish(partial, lambda number: manifest(number, step, files), keep)


def steps_in(folder: Path) -> list[int]:
    return [saved.manifest.step for saved in checkpoint_folder.readable_ones(folder)[0]]


def test_a_manifest_comes_back_as_it_was() -> None:
    assert Manifest.from_json(text := manifest(3, 20).to_json()).to_json() == text


@pytest.mark.parametrize(
    ("was", "becomes", "message"),
    [
        ('"format": 6', '"format": 7', "checkpoint.format is 7; expected 6; it was saved by a later version of Rota"),
        ('"step": 20', '"step": 21', "it has changed since it was saved"),
        ('"position": [3', '"position": [2', "it has changed since it was saved"),
        ('"step": 20', '"step": 20, "steps": 2', 'checkpoint has the field "steps", which is not known there'),
        ('"step": 20', '"step": -1', "checkpoint.step is -1; expected 0 or more"),
        ('{"c": "b"}', '{"c": "d"}', 'checkpoint.aliases is {"c": "d"}; expected other names of the weights'),
        ('"number": 1,', "", "checkpoint has no field 'number'"),
        ('{"c": "b"}', '{"c": 3}', 'checkpoint.aliases[...] is {"c": 3}; expected a text'),
        ('"files": [', '"files": [], "file": [', "expected a list of length >= 1"),
    ],
)
def test_a_wrong_manifest_is_told_by_file_and_field(tmp_path: Path, was: str, becomes: str, message: str) -> None:
    save(tmp_path, 20)
    path = tmp_path / "step-20" / "rota.json"
    text = path.read_text()
    assert was in text
    path.write_text(text.replace(was, becomes))
    (none, [(where, error)]) = checkpoint_folder.readable_ones(tmp_path)
    assert (none, where) == ([], path.parent)
    assert str(path) in str(error)
    assert message in str(error)


def test_the_newest_is_the_one_saved_last(tmp_path: Path) -> None:
    for step in (10, 9, 100, 10):
        save(tmp_path, step)
    assert steps_in(tmp_path) == [9, 100, 10]
    save(tmp_path, 1, keep=2)
    assert steps_in(tmp_path) == [10, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-10"]


class PowerCut(Exception):
    pass


@pytest.mark.parametrize("num_done", range(12))
def test_a_cut_at_any_point_leaves_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_done: int) -> None:
    """`num_done` of the writes, renames and removals of the second save are done; then the power is cut."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    left = num_done

    def counted(function: Any) -> Any:
        def act(*args: Any, **options: Any) -> Any:
            nonlocal left
            if left == 0:
                raise PowerCut
            left -= 1
            return function(*args, **options)

        return act

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", counted(Path.rename))
        patch.setattr(os, "unlink", counted(os.unlink))
        patch.setattr(os, "fsync", counted(os.fsync))
        try:
            save(tmp_path, 2, keep=1)
            finished = True
        except PowerCut:
            finished = False
    assert finished is (num_done == 11)
    checkpoint_folder.recover_folder(tmp_path)
    assert steps_in(tmp_path)[-1] == 2
    assert {path.name for path in tmp_path.iterdir()} == {f"step-{step}" for step in steps_in(tmp_path)}
    save(tmp_path, 3, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


@pytest.mark.parametrize("name", ["step-2", "step-2/rota.json/of a user", "a file", "a link"])
def test_what_is_no_checkpoint_is_not_whole_and_stays(tmp_path: Path, name: str) -> None:
    save(tmp_path / "run", 1)
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "run" / "step-2"
    if name.startswith("a "):
        path.touch() if name == "a file" else path.symlink_to(tmp_path / "elsewhere")
    else:
        (path.parent / name).mkdir(parents=True)
    assert steps_in(tmp_path / "run") == [1]
    with pytest.raises(PipelineError, match=r"step-2 exists and is not a checkpoint of Rota's; move it out of "):
        save(tmp_path / "run", 2)
    assert path.exists()
    path.rename(tmp_path / "moved")
    save(tmp_path / "run", 2)
    assert steps_in(tmp_path / "run") == [1, 2]


NOT_OURS = ("step-notes.partial", "step-x", "step-7.partial", "step-7.replaced", "step-\u0663.partial")  # but like them


def test_what_rota_did_not_make_stays(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    for name in NOT_OURS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes").write_text("of a user")
    for name in ("step-3.partial", "step-4.partial", "step-1.replaced"):  # but these were cut off
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-0.safetensors").write_bytes(b"abc")
    (tmp_path / "step-1.partial").write_text("a file")
    (tmp_path / "step-9.partial").symlink_to(tmp_path / "step-x")
    for step in (1, 7, 9):
        with pytest.raises(PipelineError, match=rf"step-{step}\.partial exists and is not a checkpoint of Rota's; "):
            save(tmp_path, step)
    save(tmp_path, 3, keep=1)
    assert steps_in(tmp_path) == [1, 3]  # to remove step 1 would need the name of the user's file
    for name in NOT_OURS:
        assert (tmp_path / name / "notes").read_text() == "of a user"
    assert (tmp_path / "step-1.partial").read_text() == "a file"
    assert (tmp_path / "step-9.partial").is_symlink()
    assert len([*tmp_path.iterdir()]) == len(NOT_OURS) + 2 + 2


def test_a_damaged_one_stands_in_nobodys_way(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step-1" / "rota.json").write_bytes(b"\0")
    assert steps_in(tmp_path) == [2, 3]
    save(tmp_path, 4, keep=2)
    assert steps_in(tmp_path) == [3, 4]
    assert (tmp_path / "step-1").exists()  # it may be of use to somebody


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


def through_a_file(value: Any) -> Any:
    """JSON as `save` writes and `load` reads it."""
    return Field("value", json.loads(json.dumps(value)))


VALUES = [
    *(None, True, 0, -(2**4000), 0.1, -0.0, 1e-320, math.nan, math.inf, -math.inf, "", "é\u2028"),
    *([], [1, [2.0]], (), (1, (2, [3])), torch.bfloat16, "\ud800"),
    *({}, {"a": {1: None, "b": []}, None: 0, 2.5: 1}, Counter({3: 2})),
    *({"$tuple": [1]}, {"a": {"$": (1,)}}),
    *(torch.tensor(0.1), torch.empty(0, 3), torch.tensor([[True, False]]), torch.arange(4.0)[::2]),
    *(torch.ones(3).to(torch.float8_e4m3fn), torch.ones(2, 3, dtype=torch.complex64).mul(1j).mT.conj()),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:30])
def test_values_come_back_as_they_were(value: Any) -> None:
    read = from_json(through_a_file(to_json(value, "value")))
    assert type(read) is type(value)
    if isinstance(value, torch.Tensor):
        assert (read.dtype, read.tolist()) == (value.dtype, value.tolist())
    else:
        assert repr(read) == repr(value)


class Named:
    """Of a class that nobody else knows."""


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 0


@pytest.mark.parametrize(
    "value",
    [
        *(Named(), len, numpy.float64(1), 2**50_000, 1 + 2j, {1, 2}, {(1, 2): 3}, {"a": [Named()]}, nested(70)),
        *(nn.Parameter(torch.ones(1)), dict.fromkeys(range(10001), 0), OrderedDict(a=1), torch.Size([1])),
        torch.ones(1, dtype=torch.complex128),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_not_come_back_is_not_saved(value: Any) -> None:
    with pytest.raises(PipelineError, match=r"the state.*leave it out of"):
        to_json(value, "the state")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"$__reduce__": []}, "expected an object whose one field is one of $float, $tuple"),
        ({"$float": "1"}, "expected one of nan, inf, -inf"),
        ({"$tuple": 3}, "expected a list"),
        ({"$dict": [[1, 2], [1, 3]]}, "expected a number or a string that occurs only once"),
        ({"$dict": [[[], 2]]}, "expected a number or a string"),
        ({"$dict": [[1]]}, "expected a list of length 2"),
        ({"$dict": [[{"$tensor": ["U8", [0], ""]}, 1]]}, "expected a number or a string"),
        ({"$dtype": "Tensor"}, "expected a dtype that safetensors has"),
        ({"$tensor": ["U8", [2], "AA=="]}, "expected the elements of a U8 tensor of size [2]"),
        ({"$tensor": ["BOOL", [1], "Ag=="]}, "expected bools that are 0 or 1"),
        ({"$tensor": ["U8", [1], "!"]}, "expected"),
        ({"$tensor": ["U8", [10**15] * 5 + [0], ""]}, "expected fewer elements"),
        ({"$tensor": ["U8", [1] * 70, "AA=="]}, "expected"),
        # Python gives all of these keys one hash, so that a dictionary of many takes time that grows with their square.
        ({"$counter": [[number * (2**61 - 1), 0] for number in range(10_001)]}, "expected at most 10,000 pairs"),
        (nested(70), "nested more than 64 levels deep"),
    ],
)
def test_values_that_are_wrong_are_refused(value: Any, message: str) -> None:
    with pytest.raises(FormatError) as error:
        from_json(Field("value", value))
    assert message in str(error.value)
    assert str(error.value).isprintable()


def written(made: Setup, num_groups: int = 2) -> dict[str, Any]:
    """All other state of a training, as `save` writes it."""
    scheduler, by_group = split_scheduler(made.scheduler, num_groups)
    groups, _ = groups_of(made.optimizer, by_group, made.keys)
    return {**training_json(), **to_json({"groups": groups, "scheduler": scheduler}, "state")}


def read_again(document: dict[str, Any]) -> Any:
    return read_training([through_a_file(document)])


def change_at(document: Any, place: tuple[Any, ...], value: Any) -> None:
    *path, last = place
    inner = document
    for step in path:
        inner = inner[step]
    inner[last] = value


CPU_STATE = ("random", "cpu")
PYTHON, NUMPY = ("random", "python", "$tuple"), ("random", "numpy", "$tuple")


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (CPU_STATE, {"$tensor": ["U8", [1], "AA=="]}, "random.cpu is not a random state"),
        (CPU_STATE, 3, "expected Tensor"),
        ((*PYTHON, 0), {"$tensor": ["U32", [1], "AAAAAA=="]}, "random.python has not 624 words"),
        ((*PYTHON, 2), "x", "expected a number"),
        ((*NUMPY, 1), 625, "expected 624 or less"),  # NumPy would read beyond its words
        (("random", "device"), ["cuda"], "expected a list of length 2"),
        (("scheduler", "$tuple", 1), 3, "expected an object"),
        (("step",), -1, "expected 0 or more"),
        (("groups", 0, "weights", "x"), 3, "expected a list"),
        (("groups", 0, "weights", "b"), [["s", "s"], {}], 'process 0 has "b", or a state of it, twice'),
        (("groups", 1, "weights", "a"), [[], {}], 'process 0 has "a", or a state of it, twice'),
        (("groups", 0, "options", "params"), 3, "process 0 has options with params"),
        (("groups", 0, "optimizer"), "\x1b", "expected a name"),
        (("groups", 0, "more"), 1, 'the field "more", which is not known'),
    ],
)
def test_a_wrong_training_state_is_told_by_field(place: tuple[Any, ...], value: Any, message: str) -> None:
    (made := Setup("steps")).train(range(2))
    read_again(document := json.loads(json.dumps(written(made))))
    change_at(document, place, value)
    with pytest.raises(FormatError) as error:
        read_again(document)
    assert message in str(error.value)
    assert str(error.value).isprintable()


def test_a_random_state_that_reads_beyond_its_words_is_refused() -> None:
    state = torch.get_rng_state()
    state[8:12] = torch.tensor([624], dtype=torch.int32).view(torch.uint8)  # left
    state[16:24] = torch.tensor([600]).view(torch.uint8)  # the next of 624
    torch.Generator().set_state(state)  # PyTorch itself lets it pass
    document = training_json()
    change_at(document, CPU_STATE, to_json(state, "state"))
    with pytest.raises(FormatError, match=r"random\.cpu is not a random state"):
        read_again(document)


@pytest.mark.parametrize(
    ("kind", "place", "value", "message"),
    [
        ("steps", ("step",), 1, 'the checkpoint would replace MultiStepLR\'s "step"'),
        ("steps", ("__class__",), 1, 'would replace MultiStepLR\'s "__class__"'),
        ("steps", ("gamma",), "x", 'gamma" was saved as a str, "x", but is a float here'),
        ("steps", ("last_epoch",), True, 'was saved as a bool, "True", but is a int here'),
        ("sequential", ("_schedulers",), [], "is not in the checkpoint"),
        ("sequential", ("_schedulers", 0, "get_lr"), 1, 'would replace SequentialLR\'s "get_lr"'),
        ("sequential", ("_schedulers", 0, "base_lrs"), [1], "is not in the checkpoint"),
        ("lambda", ("lr_lambdas",), [], "LambdaLR's lr_lambdas is not in the checkpoint"),
    ],
)
def test_a_schedulers_state_sets_nothing_but_data(kind: str, place: tuple[Any, ...], value: Any, message: str) -> None:
    made = Setup(kind)
    saved = read_again(written(made))
    of_groups = require_records(made.optimizer, made.keys, saved.records)
    before = repr(made.scheduler.state_dict())
    scheduler_state(made.scheduler, saved.scheduler, of_groups)
    change_at(saved.scheduler[1], place, value)
    with pytest.raises(PipelineError) as error:
        scheduler_state(made.scheduler, saved.scheduler, of_groups)
    assert message in str(error.value)
    assert repr(made.scheduler.state_dict()) == before


def test_options_keep_their_kinds() -> None:
    made = Setup("steps")
    records = read_again(written(made)).records
    options = records["a"].group.options
    options["lr"] = torch.tensor(0.1)
    require_records(made.optimizer, made.keys, records)
    options["lr"] = "fast"
    with pytest.raises(PipelineError, match=r"a's lr was saved as a str, \"fast\", but is a float here"):
        require_records(made.optimizer, made.keys, records)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_of_every_kind_go_on(scheduler: str) -> None:
    before, after = Setup(scheduler), Setup(scheduler)
    before.train(range(3))
    saved = read_again(written(before))
    _, tensors = groups_of(before.optimizer, {}, before.keys)
    for name, weight in before.weights.items():
        after.weights[name].data.copy_(weight)
    of_groups = require_records(after.optimizer, after.keys, saved.records)
    assert of_groups[0].scheduled
    copies = {key: value.clone() for key, value in tensors.items()}
    restore_optimizer(after.optimizer, after.keys, saved.records, copies)
    after.scheduler.load_state_dict(scheduler_state(after.scheduler, saved.scheduler, of_groups))
    assert same(after.scheduler.state_dict(), before.scheduler.state_dict())
    assert same(after.train(range(3, 8)), before.train(range(3, 8)))


def test_state_keeps_its_dtype_and_groups_their_names() -> None:
    before, after = Setup("steps"), Setup("steps", named=True)
    before.train(range(2))
    state = before.optimizer.state[before.weights["a"]]
    state["master"] = torch.randn(3)  # a float32 copy, as mixed-precision optimizers keep it
    state["count"] = 7
    _, tensors = groups_of(before.optimizer, {}, before.keys)
    restore_optimizer(after.optimizer, after.keys, read_again(written(before)).records, tensors)
    assert same(dict(after.optimizer.state[after.weights["a"]]), dict(state))
    assert [group["param_names"] for group in after.optimizer.param_groups] == [["a"], ["b"]]


@pytest.mark.parametrize("size", [(), (3,)])
@pytest.mark.parametrize(
    ("options", "of_count"),
    [({}, "cpu"), ({"fused": False}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")],
)
def test_a_count_of_steps_stays_on_the_cpu_unless_the_device_counts(
    size: tuple[int, ...], options: dict[str, Any], of_count: str
) -> None:
    weight = nn.Parameter(torch.empty(size, device="meta"))
    sizes = {"step": (), "exp_avg": size, "exp_avg_sq": size}
    chunks = {tensor_key("w", name): Chunk(name, "F32", shape, (), ()) for name, shape in sizes.items()}
    index = {key: [Part(chunk, Path(), 0, None)] for key, chunk in chunks.items()}
    found = _state_tensors(weight, "w", WeightRecord(Group("Adam", options, {}, {}), (*sizes,), {}), index)
    assert [found[tensor_key("w", name)].device.type for name in sizes] == [of_count, "meta", "meta"]
