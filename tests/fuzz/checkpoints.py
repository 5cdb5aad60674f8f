"""Folders of a checkpoint with something wrong in them, and what must hold of each: refused, or right, and nothing ran.

A stranger can give changed files the hashes that belong to them, so most mutants are signed anew: then the contents are
what is read. What is loaded is compared with what a few lines of `json` and `struct` read from the same files.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import os
import pathlib
import pickle
import random
import shutil
import struct
import sys
import zlib
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from fuzz import verdicts
from fuzz.mutating import byte_mutant, json_mutant, text_mutant
from rota import Checkpoints, Cluster, Costs, Pipeline, PipelineError, RotaError, Stages, place
from rota.cli.command import Options
from rota.cli.commands.checkpoint import checkpoint
from rota.runtime.checkpoints.saved import digest
from rota.runtime.checkpoints.values import DTYPES
from rota.schedules import gpipe
from support.checkpoint_runs import Halving

Files = dict[str, bytes | Callable[[Path], object]]  # by name: contents, or what makes something else of the name
_STEP = "step-2"


class Layer(nn.Module):
    """With a buffer of bools, whose bytes must be 0 or 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Training:
    """On this process alone: two layers in groups of their own, a schedule of schedules."""

    def __init__(self) -> None:
        self.scratch = Path(mkdtemp())
        self._exits = ExitStack()
        self._exits.callback(shutil.rmtree, self.scratch)
        dist.init_process_group("gloo", init_method=f"file://{self.scratch}/store", rank=0, world_size=1)
        self._exits.callback(dist.destroy_process_group)
        torch.manual_seed(0)
        random.seed(0)
        self.model = nn.Sequential(Layer(2), Layer(2))
        plan = gpipe(place(Costs.uniform(1), Cluster.uniform(1)), 2)
        self.pipeline = self._exits.enter_context(Pipeline(Stages([self.model]), plan, nn.functional.mse_loss))
        groups = [{"params": [*layer.parameters()], "lr": lr} for layer, lr in zip(self.model, (0.1, 0.2), strict=True)]
        self.optimizer = torch.optim.Adam(groups, betas=(0.8, 0.9))
        schedules = torch.optim.lr_scheduler
        first = schedules.LambdaLR(self.optimizer, [Halving(), lambda n: 0.9**n])
        self.scheduler = schedules.SequentialLR(
            self.optimizer, [first, schedules.MultiStepLR(self.optimizer, [2, 3])], [2]
        )
        for _ in range(3):
            self.pipeline.step(torch.ones(2, 2), torch.zeros(2, 2))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

        self.folder = self.scratch / "run"
        self.checkpoints = Checkpoints(self.folder, self.pipeline, self.optimizer, self.scheduler)
        self.checkpoints.save(2, position=[3, None], note="good")
        #: The files of a real checkpoint.
        self.files = {path.name: path.read_bytes() for path in sorted((self.folder / _STEP).iterdir())}

    def spoil(self) -> None:
        """Set everything to what no checkpoint has."""
        with torch.no_grad():
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                tensor.fill_(7)
        self.optimizer.state.clear()
        self.scheduler.last_epoch = 99
        torch.default_generator.manual_seed(77)
        random.seed(77)

    def state(self) -> list[Any]:
        """All that loading may change, to be compared by repr."""
        tensors = {name: tensor.tolist() for name, tensor in self.model.state_dict().items()}
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        states = [dict(self.optimizer.state.get(parameter, {})) for parameter in self.model.parameters()]
        drawn = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(), hash(random.getstate())
        return [tensors, groups, states, self.scheduler.state_dict(), drawn]

    def close(self) -> None:
        self._exits.close()


@cache
def training() -> Training:
    sys.addaudithook(_watch)
    return Training()


def whole() -> dict[str, bytes]:
    return training().files


_CANARY = "ROTA_CANARY"
_PICKLING = ("torch.load", "pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn")
_seen: list[str] | None = None


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is not None and event in _PICKLING:
        _seen.append(f"{event}{arguments!r:.200}")


class Trap:
    """Runs when it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, (f"import os; os.environ[{_CANARY!r}] = 'ran'",)


#: Changes a class when it is unpickled: the state of slots is set on whatever it is said to belong to.
_PATCH = b"\x80\x02cpathlib\nPurePath\nN}X\n\x00\x00\x00__fspath__cbuiltins\nrepr\ns\x86b."


@cache
def payloads() -> tuple[bytes, ...]:
    pickles = []
    for trap in (Trap(), {"records": Trap(), "scheduler": None, "random": None}, [Trap()]):
        pickles += [pickle.dumps(trap, protocol) for protocol in (0, 2, 5)]
        torch.save(trap, zipped := io.BytesIO())
        torch.save(trap, legacy := io.BytesIO(), _use_new_zipfile_serialization=False)
        pickles += [zipped.getvalue(), legacy.getvalue()]
    return (*pickles, _PATCH, b"cos\nsystem\n(S'touch canary'\ntR.", b"\x80\x04\x95")


_STRANGE_NAMES = (
    *(".metadata", "__0.metadata", "training.pt", "__0_0.distcp", "rank-1.safetensors", "rank-00.safetensors"),
    *("code.py", "rota.pkl", "sitecustomize.py", "\x1b[2J", "é", "a b", "rota.json.bak", ".rota.partial"),
)


def mutant(chooser: Random) -> Files:
    """A folder with something wrong in it."""
    files: Files = dict(whole())
    change = chooser.choices([change for change, _ in _CHANGES], [weight for _, weight in _CHANGES])[0]
    change(files, chooser)
    if chooser.random() < 0.1:
        chooser.choice([change for change, _ in _CHANGES])(files, chooser)
    if chooser.random() < 0.85:
        if chooser.random() < 0.5:
            _fit_checksums(files)
        _sign(files, add=chooser.random() < 0.5)
    return files


def _changed(text: str, chooser: Random) -> str:
    """A JSON text with something wrong in it."""
    others = [text, whole()["rota.json"].decode()] if chooser.random() < 0.1 else [text]
    return (text_mutant if chooser.random() < 0.1 else json_mutant)(text, chooser, others)


def _change_index(files: Files, chooser: Random) -> None:
    files["rota.json"] = _changed(whole()["rota.json"].decode(), chooser).encode(errors="surrogatepass")


def _change_plan(files: Files, chooser: Random) -> None:
    document = json.loads(whole()["rota.json"])
    try:
        document["plan"] = json.loads(_changed(json.dumps(document["plan"]), chooser))
        files["rota.json"] = json.dumps(document).encode()
    except (ValueError, RecursionError):
        return


def _change_head(files: Files, chooser: Random) -> None:
    """All of the header, or what Rota reads in it."""
    if chooser.random() < 0.15:
        _put_head(files, _changed(_head().decode(), chooser))
    else:
        header = json.loads(_head())
        part = chooser.choice(("tensors", "training", "training"))
        header["__metadata__"][part] = _changed(header["__metadata__"][part], chooser)
        _put_head(files, json.dumps(header))


def _head() -> bytes:
    data = whole()[_RANK]
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


def _put_head(files: Files, text: str) -> None:
    head = text.encode(errors="surrogatepass")
    files[_RANK] = struct.pack("<Q", len(head)) + head + whole()[_RANK][8 + len(_head()) :]


_RANK = "rank-0.safetensors"


def _change_bytes(files: Files, chooser: Random) -> None:
    name = chooser.choice(sorted(whole())) if chooser.random() < 0.3 else _RANK
    data = whole()[name]
    if chooser.random() < 0.5 and data:
        at = chooser.randrange(len(data))
        files[name] = data[:at] + bytes([data[at] ^ 1 << chooser.randrange(8)]) + data[at + 1 :]
    else:
        files[name] = byte_mutant(data, chooser)


def _change_random_state(files: Files, chooser: Random) -> None:
    """Of PyTorch, which is bytes in base64."""
    header = json.loads(_head())
    training = json.loads(header["__metadata__"]["training"])
    drawn = training["random"]["cpu"]["$tensor"]
    data = bytearray(base64.b64decode(drawn[2]))
    for _ in range(chooser.choice((1, 1, 2, 8))):
        data[chooser.choice((chooser.randrange(len(data)), chooser.randrange(28)))] = chooser.randrange(256)
    drawn[2] = base64.b64encode(data).decode()
    header["__metadata__"]["training"] = json.dumps(training)
    _put_head(files, json.dumps(header))


def _swap(files: Files, chooser: Random) -> None:
    if len(files) < 2:  # one has been removed
        return
    first, second = chooser.sample(sorted(files), 2)
    files[first], files[second] = files[second], files[first]
    if chooser.random() < 0.3:
        files[second] = files[first]


def _remove(files: Files, chooser: Random) -> None:
    del files[chooser.choice(sorted(files))]


def _add(files: Files, chooser: Random) -> None:
    files[chooser.choice(_STRANGE_NAMES)] = chooser.choice([*payloads(), *whole().values(), b""])


def _put_pickle(files: Files, chooser: Random) -> None:
    name, payload = chooser.choice(sorted(whole())), chooser.choice(payloads())
    form = chooser.random()
    if form < 0.6:
        files[name] = payload
    elif form < 0.8:
        files[name] = whole()[name] + payload
    else:  # of a size that fits
        files[name] = (payload + whole()[name])[: len(whole()[name])]


def _replace(files: Files, chooser: Random) -> None:
    """By what is no file."""
    made = (
        os.mkfifo,
        Path.mkdir,
        *(_link_to(target) for target in ("/dev/zero", "rota.json", "/etc/passwd", "nowhere")),
    )
    files[chooser.choice(sorted(whole()))] = chooser.choice(made)


def _link_to(target: str) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(target)


_CHANGES: tuple[tuple[Callable[[Files, Random], None], float], ...] = (
    (_change_index, 0.18),
    (_change_plan, 0.06),
    (_change_head, 0.42),
    (_change_bytes, 0.1),
    (_change_random_state, 0.03),
    (_swap, 0.04),
    (_remove, 0.02),
    (_add, 0.05),
    (_put_pickle, 0.08),
    (_replace, 0.02),
)


def _fit_checksums(files: Files) -> None:
    """Those of the chunks, as the header places them."""
    document, data = _parsed(files, "rota.json"), files.get(_RANK)
    try:
        (length,) = struct.unpack_from("<Q", data)
        chunks = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["tensors"])
        counts = [math.prod(sizes) * DTYPES[dtype].itemsize for _, dtype, _, _, sizes in chunks]
        ends = [*accumulate(counts, initial=8 + length)]
        document["files"][0][2] = [zlib.crc32(data[begin:end]) for begin, end in pairwise(ends)]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError, struct.error):
        return
    files["rota.json"] = json.dumps(document).encode()


def _sign(files: Files, add: bool) -> None:
    """Give the index the sizes and hashes of the files, of added ones too, and the hash that belongs to it."""
    document = _parsed(files, "rota.json")
    if not isinstance(document, dict):
        return
    listed = document.get("files")
    if isinstance(listed, list):
        if add and "rank-1.safetensors" in files:
            listed.append([0, "", []])
        for number, entry in enumerate(listed):
            data = files.get(f"rank-{number}.safetensors")
            if isinstance(data, bytes) and isinstance(entry, list) and len(entry) == 3:
                end = 8 + int.from_bytes(data[:8], "little")
                entry[:2] = [len(data), hashlib.sha256(data[:end]).hexdigest()]
    document.pop("sha256", None)
    try:
        document["sha256"] = digest(document)
    except (RotaError, ValueError):  # ValueError: of half a character
        return
    files["rota.json"] = json.dumps(document).encode()


def _parsed(files: Files, name: str) -> Any:
    try:
        return json.loads(files[name])  # type: ignore[arg-type]
    except (KeyError, ValueError, TypeError, RecursionError):
        return None


def write(files: Files, folder: Path) -> None:
    """As the only checkpoint of a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    (path := folder / _STEP).mkdir(parents=True)
    for name, made in files.items():
        if isinstance(made, bytes):
            (path / name).write_bytes(made)
        else:
            made(path / name)


@dataclass(frozen=True, slots=True)
class Stranger:
    """What an independent reader finds in a folder's files."""

    tensors: dict[str, torch.Tensor]
    training: dict[str, Any]

    @classmethod
    def of(cls, path: Path) -> Stranger:
        tensors: dict[str, torch.Tensor] = {}
        trainings = []
        for number in range(len(json.loads((path / "rota.json").read_text())["files"])):
            data = (path / f"rank-{number}.safetensors").read_bytes()
            end = 8 + int.from_bytes(data[:8], "little")
            metadata = json.loads(data[8:end])["__metadata__"]
            trainings.append(json.loads(metadata["training"]))
            for key, dtype, size, offsets, sizes in json.loads(metadata["tensors"]):
                part = tensors.setdefault(key, torch.empty(size, dtype=DTYPES[dtype]))
                for dimension, (offset, length) in enumerate(zip(offsets, sizes, strict=True)):
                    part = part.narrow(dimension, offset, length)
                begin, end = end, end + part.numel() * part.itemsize
                if part.numel():
                    part.copy_(torch.frombuffer(bytearray(data[begin:end]), dtype=part.dtype).reshape(sizes))
        return cls(tensors, trainings[0])


def use(files: Files, chooser: Random) -> str:
    """Look at a folder with these files by every command, and load it. Returns how that ended."""
    global _seen
    write(files, folder := training().folder)
    training().spoil()
    before, fspath = repr(training().state()), pathlib.PurePath.__fspath__
    _seen = []
    try:
        with mock.patch("torch.load", side_effect=lambda *args, **options: _watch("torch.load", args)):
            outcome = _read(folder, before, chooser)
    finally:
        seen, _seen = _seen, None
        assert not seen, f"a checkpoint was unpickled, or ran something: {seen}"
        assert _CANARY not in os.environ, "the canary ran"
        assert pathlib.PurePath.__fspath__ is fspath, "a class was changed"
    assert {path.name for path in folder.iterdir()} <= {_STEP, "model.safetensors"}
    return outcome


def _read(folder: Path, before: str, chooser: Random) -> str:
    if chooser.random() < 0.2:
        _act("ls", folder)
    if chooser.random() < 0.5:
        _act("export", folder)
    is_whole = _act("verify", folder) == 0
    try:
        loaded = training().checkpoints.load()
    except PipelineError as refusal:
        error = refusal
    else:
        error = None
    if error is not None:
        assert repr(training().state()) == before, f"refused, but changed something: {error}"
        assert not (is_whole and "no other checkpoint is whole" in str(error)), f"verified, but damaged: {error}"
        verdicts.refused(error)
        return "of another model or optimizer" if is_whole else "damaged"
    if loaded is None:
        assert not is_whole
        return "no checkpoint"
    path = folder / _STEP
    assert is_whole, "loaded what verify finds damaged"
    assert loaded.step == json.loads((path / "rota.json").read_text())["step"]
    _compare(Stranger.of(path))
    return "accepted"


def _act(action: str, folder: Path) -> int | None:
    """The command's exit code, None where it refuses."""
    output = str(folder / "model.safetensors") if action == "export" else None
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        ended = verdicts.tried(
            lambda: (
                checkpoint.commands[action].callback(
                    Options(folder=str(folder), output=output, config=None, json=False)
                )
                or 0
            )
        )
    for line in (out.getvalue() + err.getvalue()).splitlines():
        assert line.isprintable(), f"not printable: {line!r}"
    return ended


def _compare(saved: Stranger) -> None:
    """What was loaded is what the files say."""
    model, optimizer, scheduler = training().model, training().optimizer, training().scheduler
    for name, tensor in model.state_dict().items():
        assert _same(tensor, saved.tensors[f"model/{name}"]), f"{name} was not loaded right"
    records = {
        key: (group, *_plain(state)) for group in saved.training["groups"] for key, state in group["weights"].items()
    }
    for name, parameter in model.named_parameters():
        state, (shared, tensors, values) = optimizer.state[parameter], records[name]
        assert set(state) == {*tensors, *values}
        for key in tensors:
            assert _same(state[key], saved.tensors[f"optimizer/{name}/{key}"]), f"{key} of {name} was not loaded right"
        group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
        for key, value in shared["options"].items():
            if isinstance(value, (int, float, str)):
                assert repr(group[key]) == repr(value), f"{key} of {name} is {group[key]}, saved as {value}"
    for key, value in _plain(saved.training["scheduler"])[1].items():
        if isinstance(value, (int, float, str)):
            assert repr(scheduler.state_dict()[key]) == repr(value)
    drawn = saved.training["random"]
    assert base64.b64decode(drawn["cpu"]["$tensor"][2]) == torch.get_rng_state().numpy().tobytes()
    _, (*words, position), _ = random.getstate()
    of_python = _plain(drawn["python"])
    assert base64.b64decode(of_python[0]["$tensor"][2]) == struct.pack("<624I", *words)
    assert of_python[1] == position


def _plain(value: Any) -> Any:
    """The entries of a list or a tuple."""
    return value["$tuple"] if isinstance(value, dict) else value


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """To the bit: nan too."""
    return left.dtype == right.dtype and left.shape == right.shape and left.numpy().tobytes() == right.numpy().tobytes()
