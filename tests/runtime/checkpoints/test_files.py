"""The folder of checkpoints, and the state of optimizers and schedulers by weight; no processes."""

from __future__ import annotations

import base64
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
from rota.runtime.checkpoints.manifest import File, Manifest
from rota.runtime.checkpoints.optimizer_state import (
    Record,
    SavedScheduler,
    read_records,
    records_of,
    require_records,
    restore_optimizer,
    same,
    scheduler_state,
    split_scheduler,
    tensor_key,
)
from rota.runtime.checkpoints.random_states import random_state
from rota.runtime.checkpoints.rank_file import Chunk
from rota.runtime.checkpoints.state import TrainingState, _state_tensors
from rota.runtime.checkpoints.values import from_json, to_json


def manifest(number: int, step: int, **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "extra": {"position": [3, None, {"a": 0.5}]},
        "num_ranks": 2,
        "num_replicas": 1,
        "weights": {"a.weight": 1, "b": 4},
        "aliases": {"c": "b"},
        "files": (File(3, "ab" * 32, (7,)),),
        "plan": {"num_microbatches": 3},
        "training": [None],
    }
    return Manifest(number=number, step=step, **{**fields, **changes})


def save(folder: Path, step: int, keep: int | None = None) -> None:
    partial = checkpoint_folder.begin(folder, step)
    (partial / "rank-0.safetensors").write_bytes(b"abc")
    written = manifest(checkpoint_folder.next_number(folder), step).to_json()
    checkpoint_folder.write_synced(partial / "rota.json", written.encode())
    checkpoint_folder.publish(partial, keep)


def steps_in(folder: Path) -> list[int]:
    return [saved.manifest.step for saved in checkpoint_folder.readable_ones(folder)[0]]


def test_a_manifest_comes_back_as_it_was() -> None:
    assert Manifest.from_json((whole := manifest(3, 20)).to_json()) == whole


@pytest.mark.parametrize(
    ("was", "becomes", "told"),
    [
        ('"format": 5', '"format": 6', "checkpoint.format is 6; expected 5; it was saved by a later version of Rota"),
        ('"format": 5', '"format": 4', "it was saved by an earlier version of Rota; use it with that version"),
        ('"step": 20', '"step": 21', "it has changed since it was saved"),
        ('"position": [3', '"position": [2', "it has changed since it was saved"),
        ('"step": 20', '"step": 20, "steps": 2', 'checkpoint has the field "steps" = 2, which is not one of'),
        ('"step": 20', '"step": -1', "checkpoint.step is -1; expected 0 or more"),
        ('"b": 4', '"b": 0', 'checkpoint.weights[...] is {"a.weight": 1, "b": 0}; expected 1 or more'),
        ('{"c": "b"}', '{"c": "d"}', 'checkpoint.aliases is {"c": "d"}; expected other names of the weights'),
        ('{"c": "b"}', '{"b": "b"}', 'checkpoint.aliases is {"b": "b"}; expected other names of the weights'),
        ('"aliases": {"c": "b"}', '"aliases": []', "checkpoint.aliases is []; expected an object"),
        ('"number": 1,', "", "checkpoint has no field 'number'"),
        ('"number"', '"numbers"', 'checkpoint has the field "numbers" = 1, which is not one of'),
        ('"rota": "checkpoint"', '"rota": "plan"', 'it says "rota": "plan"'),
        ('"b": 4', '"a.weight": 4', 'it has an object with two fields "a.weight"'),
        ('{"c": "b"}', '{"c": 3}', 'checkpoint.aliases[...] is {"c": 3}; expected a text'),
        ("[7]", "[-7]", "checkpoint.files[0][2][0] is -7; expected 0 or more"),
        ("[7]", "[4294967296]", "expected 4294967295 or less"),
        ('[3, "abab', '[true, "abab', "checkpoint.files[0][0] is true; expected a whole number"),
        (", [7]]", "]", "expected a list of length 3"),
    ],
)
def test_a_wrong_manifest_is_told_by_file_and_field(tmp_path: Path, was: str, becomes: str, told: str) -> None:
    save(tmp_path, 20)
    path = tmp_path / "step-20" / "rota.json"
    text = path.read_text()
    assert was in text
    path.write_text(text.replace(was, becomes))
    (none, [(where, error)]) = checkpoint_folder.readable_ones(tmp_path)
    assert (none, where) == ([], path.parent)
    assert str(path) in str(error)
    assert told in str(error)


def test_the_newest_is_the_one_saved_last(tmp_path: Path) -> None:
    for step in (10, 9, 100, 10):
        save(tmp_path, step)
    assert steps_in(tmp_path) == [9, 100, 10]
    save(tmp_path, 1, keep=2)
    assert steps_in(tmp_path) == [10, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-10"]


class PowerCut(Exception):
    pass


@pytest.mark.parametrize("num_done", range(9))
def test_a_cut_at_any_point_leaves_a_whole_one_of_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_done: int
) -> None:
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
        patch.setattr(checkpoint_folder, "write_synced", counted(checkpoint_folder.write_synced))
        try:
            save(tmp_path, 2, keep=1)
            finished = True
        except PowerCut:
            finished = False
    assert finished is (num_done == 8)
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
    (tmp_path / "step-1.partial").write_text("a file")
    (tmp_path / "step-9.partial").symlink_to(tmp_path / "step-x")
    for step in (1, 7, 9):
        with pytest.raises(
            PipelineError, match=rf"step-{step}\.partial exists and is not a checkpoint of Rota's; move "
        ):
            save(tmp_path, step)
    save(tmp_path, 3, keep=1)
    assert steps_in(tmp_path) == [1, 3]  # to remove step 1 would need the name of the user's file
    for name in NOT_OURS:
        assert (tmp_path / name / "notes").read_text() == "of a user"
    assert (tmp_path / "step-1.partial").read_text() == "a file"
    assert (tmp_path / "step-9.partial").is_symlink()
    assert len([*tmp_path.iterdir()]) == len(NOT_OURS) + 2 + 2


def test_what_was_cut_off_is_removed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-3.partial").mkdir()
    for name in ("step-4.partial", "step-1.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-0.safetensors").write_bytes(b"abc")
    checkpoint_folder.recover_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_damaged_one_stands_in_nobodys_way(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step-1" / "rota.json").write_bytes(b"\0")
    assert steps_in(tmp_path) == [2, 3]
    save(tmp_path, 4, keep=2)
    assert steps_in(tmp_path) == [3, 4]
    assert (tmp_path / "step-1").exists()  # it may be of use to somebody


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


def through_a_file(value: Any) -> Any:
    """JSON as `save` writes and `load` reads it."""
    return Field("value", json.loads(json.dumps(value)))


VALUES = [
    *(None, True, 0, -(2**4000), 0.1, -0.0, 1e-320, math.nan, math.inf, -math.inf, "", "é\u2028"),
    *([], [1, [2.0]], (), (1, (2, [3])), torch.Size([2, 3]), torch.bfloat16, "\ud800"),
    *({}, {"a": {1: None, "b": []}, None: 0, 2.5: 1}, Counter({3: 2}), OrderedDict([("b", 1), ("a", 2)])),
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
        *(nn.Parameter(torch.ones(1)), dict.fromkeys(range(10001), 0)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_not_come_back_is_not_saved(value: Any) -> None:
    with pytest.raises(PipelineError, match=r"the state.*leave it out of"):
        to_json(value, "the state")


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"$__reduce__": []}, "expected an object whose one field is one of $float, $tuple"),
        ({"$float": "1"}, "expected one of nan, inf, -inf"),
        ({"$tuple": 3}, "expected a list"),
        ({"$dict": [[1, 2], [1, 3]]}, "expected a number or a string that occurs only once"),
        ({"$dict": [[[], 2]]}, "expected a number or a string"),
        ({"$dict": [[1]]}, "expected a list of length 2"),
        ({"$dict": [[{"$tensor": ["uint8", [0], ""]}, 1]]}, "expected a number or a string"),
        ({"$dtype": "Tensor"}, "expected a dtype that PyTorch has"),
        ({"$size": [-1]}, "expected 0 or more"),
        ({"$tensor": ["uint8", [2], "AA=="]}, "expected the elements of a uint8 tensor of size [2]"),
        ({"$tensor": ["bool", [1], "Ag=="]}, "expected the elements of a bool tensor of size [1]"),
        ({"$tensor": ["uint8", [1], "!"]}, "expected"),
        ({"$tensor": ["uint8", [10**15] * 5 + [0], ""]}, "expected fewer elements"),
        ({"$tensor": ["uint8", [1] * 40, "AA=="]}, "expected"),
        # Python gives all of these keys one hash, so that a dictionary of many takes time that grows with their square.
        ({"$counter": [[number * (2**61 - 1), 0] for number in range(10_001)]}, "expected at most 10,000 pairs"),
        (nested(70), "nested more than 64 levels deep"),
    ],
)
def test_values_that_are_wrong_are_refused(value: Any, told: str) -> None:
    with pytest.raises(FormatError) as error:
        from_json(Field("value", value))
    assert told in str(error.value)
    assert str(error.value).isprintable()


def written_training() -> dict[str, Any]:
    made = Setup("steps")
    made.train(range(2))
    scheduler, by_group = split_scheduler(made.scheduler, 2)
    records, _ = records_of(made.optimizer, by_group, made.keys)
    assert scheduler is not None
    written = {
        "records": records,
        "scheduler": to_json(msgspec.structs.asdict(scheduler), "scheduler"),
        "random": msgspec.to_builtins(random_state(torch.device("cpu"))),
    }
    TrainingState.from_json(through_a_file(written))
    return json.loads(json.dumps(written))


def change_at(document: Any, place: tuple[Any, ...], value: Any) -> None:
    *path, last = place
    inner = document
    for step in path:
        inner = inner[step]
    inner[last] = value


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        (("random", "torch"), "AA==", "expected a random state"),
        (("random", "torch"), 3, "expected bytes"),
        (("random", "python", "words"), "AAAAAA==", "expected"),
        (("random", "python", "gauss"), "x", "expected a number"),
        (("random", "numpy", "position"), 625, "expected 624 or less"),  # NumPy would read beyond its words
        (("random", "cuda"), 3, 'the field "cuda", which is not known'),
        (("random", "device"), ["cuda"], "expected an object"),
        (("scheduler", "state"), 3, "expected an object"),
        (("scheduler", "class"), "x", 'the field "class", which is not known'),
        (("scheduler",), [], "expected an object"),
        (("records",), 3, "expected a list"),
        (("records", 0), [{}], "expected a list of length 2"),
        (("records", 0, 1, "x"), 3, "expected a list"),
        (("records", 0, 1, "b"), [[], {}], "expected weights and names that occur once"),
        (("records", 0, 0, "options", "params"), 3, "expected options without params"),
        (("records", 0, 0, "options"), [], "expected a dict"),
        (("records", 0, 1, "a", 1), {"momentum_buffer": 3}, "expected weights and names that occur once"),
        (("records", 0, 1, "a"), [[], {}, 1], "expected a list of length 2"),
        (("records", 0, 0, "scheduled", 0, 0), [], "expected a list of length >= 1"),
        (("records", 0, 0, "scheduled", 0, 0), [-1], "expected 0 or more"),
        (("records", 0, 0, "optimizer"), "\x1b", "expected a name"),
        (("records", 0, 0, "more"), 1, 'the field "more", which is not known'),
    ],
)
def test_a_wrong_training_state_is_told_by_field(place: tuple[Any, ...], value: Any, told: str) -> None:
    change_at(document := written_training(), place, value)
    with pytest.raises(FormatError) as error:
        TrainingState.from_json(Field("training", document))
    assert told in str(error.value)
    assert "training" in str(error.value)


def test_a_random_state_that_reads_beyond_its_words_is_refused() -> None:
    document = written_training()
    state = torch.get_rng_state()
    state[8:12] = torch.tensor([624], dtype=torch.int32).view(torch.uint8)  # left
    state[16:24] = torch.tensor([600]).view(torch.uint8)  # the next of 624
    torch.Generator().set_state(state)  # PyTorch itself lets it pass
    document["random"]["torch"] = base64.b64encode(state.numpy()).decode()
    with pytest.raises(FormatError, match="expected a random state"):
        TrainingState.from_json(Field("training", document))


@pytest.mark.parametrize(
    ("kind", "place", "value", "told"),
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
def test_a_schedulers_state_sets_nothing_but_data(kind: str, place: tuple[Any, ...], value: Any, told: str) -> None:
    made = Setup(kind)
    records, _ = records_of(made.optimizer, split_scheduler(made.scheduler, 2)[1], made.keys)
    saved, _ = split_scheduler(made.scheduler, 2)
    of_groups = require_records(made.optimizer, made.keys, read_records(through_a_file(records)))
    before = repr(made.scheduler.state_dict())
    scheduler_state(made.scheduler, saved, of_groups)
    assert saved is not None
    change_at(saved.state, place, value)
    with pytest.raises(PipelineError) as error:
        scheduler_state(made.scheduler, saved, of_groups)
    assert told in str(error.value)
    assert repr(made.scheduler.state_dict()) == before


def test_options_keep_their_kinds() -> None:
    made = Setup("steps")
    records = read_records(through_a_file(records_of(made.optimizer, {}, made.keys)[0]))
    records["a"].options["lr"] = torch.tensor(0.1)
    require_records(made.optimizer, made.keys, records)
    records["a"].options["lr"] = "fast"
    with pytest.raises(PipelineError, match=r"a's lr was saved as a str, \"fast\", but is a float here"):
        require_records(made.optimizer, made.keys, records)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_of_every_kind_go_on(scheduler: str) -> None:
    before, after = Setup(scheduler), Setup(scheduler)
    before.train(range(3))
    saved, by_group = split_scheduler(before.scheduler, 2)
    written, tensors = records_of(before.optimizer, by_group, before.keys)
    assert by_group
    assert saved is not None
    state, records = from_json(through_a_file(to_json(saved.state, "scheduler"))), read_records(through_a_file(written))
    saved = SavedScheduler(saved.scheduler, state)
    for name, weight in before.weights.items():
        after.weights[name].data.copy_(weight)
    restore_optimizer(after.optimizer, after.keys, records, {key: value.clone() for key, value in tensors.items()})
    of_groups = require_records(after.optimizer, after.keys, records)
    after.scheduler.load_state_dict(scheduler_state(after.scheduler, saved, of_groups))
    assert same(after.scheduler.state_dict(), before.scheduler.state_dict())
    assert same(after.train(range(3, 8)), before.train(range(3, 8)))


def test_state_keeps_its_dtype_and_groups_their_names() -> None:
    before, after = Setup("steps"), Setup("steps", named=True)
    before.train(range(2))
    state = before.optimizer.state[before.weights["a"]]
    state["master"] = torch.randn(3)  # a float32 copy, as mixed-precision optimizers keep it
    state["count"] = 7
    written, tensors = records_of(before.optimizer, {}, before.keys)
    restore_optimizer(after.optimizer, after.keys, read_records(through_a_file(written)), tensors)
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
    chunks = {tensor_key("w", name): Chunk(name, torch.float32, of, ((), ())) for name, of in sizes.items()}
    found = _state_tensors(weight, "w", Record("Adam", options, {}, [*sizes], {}), chunks)
    assert [found[tensor_key("w", name)].device.type for name in sizes] == [of_count, "meta", "meta"]
