"""The user's models: MODEL.py or hf:config.json of profiles and `rota autoplan`, FILE.py:FUNCTION of `rota export`."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import nn

from rota.calibration.size_fit import fit_sizes
from rota.core import reading
from rota.core.errors import FormatError, RotaError
from rota.core.layers import Profile
from rota.core.sizes import Size, SizeModel
from rota.cutting import cut
from rota.models import Stages
from rota.planning.request import MEASURED_HERE, Measuring
from rota.profiling import ProfileOptions, profile_model
from rota.profiling.devices import is_here
from rota.profiling.stage_run import MakeOptimizer
from rota.runtime.launcher_files import given_plan
from rota.runtime.losses import LossFn
from rota.runtime.messages import over_tensors
from rota.torch_internals import copies_to_meta

_Model = TypeVar("_Model")
_OF_TRANSFORMERS = "hf:"  # what a config.json of transformers begins with, instead of a file
_LENGTH = 1024  # of a row in tokens, if nothing else is asked for; fewer where the model takes fewer
#: Fields by which a config brings code, or other weights than PyTorch trains.
_REFUSED = {
    "auto_map": "it names code of its own, which Rota does not run",
    "custom_pipelines": "it names code of its own, which Rota does not run",
    "quantization_config": "its weights are quantized, and quantized weights cannot be trained",
}
_ATTENTION = ("attn_implementation", "_attn_implementation")
_SMALL_BYTES = 2**26  # of parameters: such a model runs a row in seconds, also on a CPU

_REQUIRED = ("make_model", "make_batch", "loss_fn")
EXAMPLE = """\
    def make_model():
        return GPT()                                   # with CutPoints, an nn.Sequential, or rota.Stages

    def make_batch(rows):
        return inputs, targets                         # one micro-batch of that many rows

    def loss_fn(output, target):
        return nn.functional.cross_entropy(output, target)

    def make_optimizer(parameters):                    # optional
        return torch.optim.AdamW(parameters)"""


@final
@dataclass(frozen=True, slots=True)
class ModelFile:
    """What a MODEL.py defines."""

    path: str
    make_model: Callable[[], nn.Module | Stages]
    make_batch: Callable[[int], tuple[Any, Any]]
    loss_fn: LossFn
    make_optimizer: MakeOptimizer | None = None
    make_unsplit: Callable[[], nn.Module] | None = None

    def made_model(self) -> nn.Module | Stages:
        """What make_model returns. Raises FormatError if it fails, or returns something else."""
        model = _made(self.path, "make_model", self.make_model)
        if not isinstance(model, nn.Module | Stages):
            raise FormatError(
                f"{self.path}: make_model returned a {type(model).__name__}; return an nn.Module, or rota.Stages"
            )
        return model

    def made_batch(self, rows: int) -> tuple[Any, Any]:
        """Inputs and targets of that many rows. Raises FormatError if make_batch fails, or returns something else."""
        batch = _made(self.path, f"make_batch({rows})", lambda: self.make_batch(rows))
        if not isinstance(batch, tuple) or len(batch) != 2:
            raise FormatError(f"{self.path}: make_batch({rows}) did not return a pair; return (inputs, targets)")
        return batch


def load_model_file(path: str, length: int | None = None) -> ModelFile:
    """The file, run as `python path` would, but under another name; or what `hf:config.json` describes.

    `length`: tokens per row of the batches that are made where the file does not make them, or makes them by
    `make_batch(rows, length)`. Raises FormatError if the file lacks something, or fails.
    """
    if path.startswith(_OF_TRANSFORMERS):
        config_path, config = _read_config(path)
        batches = _batches_of(config, length, config_path)
        return ModelFile(path, partial(_language_model, config_path, config), batches, _own_loss)
    reading.read_text(path)
    module = _module(path)
    functions: dict[str, Any] = {
        name: getattr(module, name, None) for name in (*_REQUIRED, "make_optimizer", "make_unsplit")
    }
    make_model, make_batch = functions["make_model"], functions["make_batch"]
    if make_batch is None and callable(make_model):
        model = _made_without_weights(make_model, path, lambda _: None)  # only for its config
        config = getattr(model, "config", None)
        if hasattr(config, "model_type"):  # a model of transformers
            functions["make_batch"] = _batches_of(config, length, path)
            functions["loss_fn"] = functions["loss_fn"] or _own_loss
    elif length is not None and callable(make_batch) and "length" in signature(make_batch).parameters:
        functions["make_batch"] = partial(make_batch, length=length)
    for name in _REQUIRED:
        if not callable(functions[name]):
            raise FormatError(f"{path} defines no function {name}; it needs:\n{EXAMPLE}")
    return ModelFile(path, **functions)


def _module(path: str) -> ModuleType:
    name = f"rota_model_file_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FormatError(f"{path} is not a Python file; give one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where the sources of its classes are looked up
    with _importing_beside(path):
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            raise FormatError(f"{path} cannot be run: {_why_not_run(error, path)}") from error
    return module


def _why_not_run(error: BaseException, path: str) -> str:
    """The error of a file that is run for its functions; what is meant for a script must be behind a guard."""
    if isinstance(error, SystemExit):
        effect = "it ends the process"
    elif any(frame.name == given_plan.__name__ for frame in traceback.extract_tb(error.__traceback__)):
        effect = "it begins to train"
    else:
        return _with_line(error, path)
    return (
        f"{effect}{_line_text(error, path)}, but is run here for the functions that it defines; put what only a script "
        f'should do under `if __name__ == "__main__":`'
    )


def profile_file(
    file: ModelFile,
    rows: Iterable[int],
    how: Measuring = MEASURED_HERE,
    report: Callable[[str], None] = lambda _: None,
    within_s: float = math.inf,
) -> Profile:
    """Costs of the model's layers for micro-batches of `rows` rows.

    For an estimate, the model is made on the meta device, where it needs no memory, if it can be.
    """
    is_measured = how.device is None or is_here(how.device)
    if is_measured:
        with torch.device(how.device or "cpu"):
            model = file.made_model()
        if how.device is not None:
            for module in model.modules if isinstance(model, Stages) else (model,):
                module.to(how.device)
    else:
        model = _made_without_weights(file.made_model, file.path, _say_once)

    def make_batch(count: int) -> tuple[Any, Any]:
        batch = file.made_batch(count)
        return over_tensors(lambda tensor: tensor.to(how.device), batch) if is_measured and how.device else batch

    estimated_for = None if is_measured else how.device
    try:
        options = ProfileOptions(
            file.make_optimizer, how.repeats, estimated_for, report, how.cache, how.refresh, how.cuts, within_s
        )
        return profile_model(model, make_batch, rows, file.loss_fn, options)
    except RotaError:
        raise
    except Exception as error:
        if not _line_text(error, file.path):
            raise
        raise FormatError(f"{file.path}: running the model failed: {_with_line(error, file.path)}") from error


class SizeProfile(NamedTuple):
    """The costs of stages by size, and where the model is cut into these stages."""

    model: SizeModel
    cuts: tuple[str, ...]


def profile_file_sizes(
    path: str,
    lengths: Sequence[int],
    rows: Sequence[int],
    num_stages: int,
    how: Measuring,
    report: Callable[[str], None] = lambda _: None,
) -> SizeProfile:
    """Profile the model of a file at each length and number of rows, cut it into stages, and fit.

    The stages are balanced at the middle length. A file with batches of its own makes them by `make_batch(rows,
    length)`. Raises FormatError as `load_model_file`, PlacementError if lengths and rows are fewer than two sizes.
    """
    profiles = {length: profile_file(load_model_file(path, length), rows, how, report) for length in sorted(lengths)}
    middle = sorted(lengths)[len(lengths) // 2]
    layers = profiles[middle][max(rows)]
    boundaries = cut(layers, num_stages)
    measured = [
        (Size.padded([length] * number), profile[number].stages(boundaries))
        for length, profile in profiles.items()
        for number in profile
    ]
    return SizeProfile(fit_sizes(measured), layers.cuts_at(boundaries))


# --- hf:config.json, a model of transformers, made without network ----------------------------------------------------


def _language_model(path: str, config: Any) -> nn.Module:
    """The language model of the config in a file, with random weights of its dtype, in training mode."""
    import transformers

    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM):
        if type(config) in auto._model_mapping:
            how = {"dtype": config.dtype or torch.float32, "trust_remote_code": False}
            model: nn.Module = auto.from_config(config, **how)
            return model.train()
    raise FormatError(
        f"{path}: transformers has no language model for model_type {config.model_type!r}; write a MODEL.py whose "
        f"make_model makes it"
    )


def _read_config(spec: str) -> tuple[str, Any]:
    """The file of `hf:config.json`, and its config.

    Raises FormatError if it brings code, or if transformers does not know it.
    """
    path = spec.removeprefix(_OF_TRANSFORMERS)
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    try:
        fields = reading.load(reading.read_text(path))
    except ValueError as error:
        raise FormatError(f"{path}: is not JSON: {error}") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise FormatError(f"{path}: has no model_type; give the config.json of a transformers model")
    for name, value in _fields(fields):
        if name in _REFUSED and value:
            raise FormatError(f"{path}: has {name}: {_REFUSED[name]}; write a MODEL.py with make_model")
        if name in _ATTENTION and isinstance(value, str) and "/" in value:
            raise FormatError(f"{path}: {name} {value!r} would be downloaded; leave it out, or say 'sdpa'")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        from transformers import AutoConfig
    except ImportError:
        raise FormatError(f"{spec}: this needs transformers; install it with: pip install transformers") from None
    try:
        config = AutoConfig.for_model(**{**fields, "use_cache": False})
    except Exception as error:
        raise FormatError(f"{path}: transformers does not accept it: {type(error).__name__}: {error}") from error
    return path, config


def _fields(fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        yield name, value
        if isinstance(value, dict):
            yield from _fields(value)


def _batches_of(config: Any, length: int | None, path: str) -> Callable[[int], tuple[Any, Any]]:
    """Makes batches of random tokens for a model with this config: its keyword inputs with labels, and the labels."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(text, "vocab_size", None)
    if not isinstance(vocabulary, int):
        raise FormatError(f"{path}: the model's config has no vocab_size to make tokens from; define make_batch(rows)")
    longest = getattr(text, "max_position_embeddings", None) or _LENGTH
    if length is not None and length > longest:
        raise FormatError(f"--length {length}: the model of {path} takes {longest} tokens at most")
    columns = length or min(_LENGTH, longest)

    def make_batch(rows: int) -> tuple[Any, Any]:
        tokens = torch.randint(vocabulary, (rows, columns))
        return {"input_ids": tokens, "labels": tokens}, tokens

    return make_batch


def _own_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - the model has had them
    """The loss that the model has made of its labels."""
    loss: torch.Tensor = output.loss
    return loss


# --- FILE.py:FUNCTION -------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class ExportedModel:
    """What FILE.py:FUNCTION has made, on the meta device if it can; the function, and the file's make_batch, if any."""

    path: str
    model: nn.Module
    make: Callable[[], Any]
    make_batch: Callable[[int], Any] | None

    def with_batch(self) -> tuple[nn.Module, Any]:
        """The model and the inputs of one row: with weights if these are small, otherwise on the meta device.

        Raises FormatError if the file makes no such batch.
        """
        if self.make_batch is None:
            raise FormatError(f"{self.path} has no make_batch(rows)")
        num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())
        make_batch = self.make_batch
        inputs, _ = _made(self.path, "make_batch(1)", lambda: make_batch(1))
        model = _made(self.path, "making the model", self.make) if num_bytes <= _SMALL_BYTES else self.model
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        return model, over_tensors(lambda tensor: tensor.to(device), inputs)


def load_exported_model(spec: str) -> ExportedModel:
    """The model that `spec`, FILE.py:FUNCTION, makes.

    The file is run as `python FILE.py` would run it: it can import what is beside it. Where the function needs
    numbers, the weights are made after all, with a note on standard error. Raises FormatError where there is no such
    function, or where it fails or returns no module.
    """
    path, colon, name = spec.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise FormatError(f"--model {spec}: give FILE.py:FUNCTION, such as model.py:make_model")
    reading.read_text(path)
    module = _module(path)
    make, make_batch = getattr(module, name, None), getattr(module, "make_batch", None)
    if not callable(make):
        raise FormatError(f"--model {spec}: {path} has no function {name!r}; define it, or name another")
    model = _made_without_weights(partial(_made, path, f"{name}()", make), path, _say_once)
    if not isinstance(model, nn.Module):
        raise FormatError(f"--model {spec}: {name}() returned a {type(model).__name__}; return an nn.Module")
    return ExportedModel(path, model, make, make_batch if callable(make_batch) else None)


# --- running the user's functions -------------------------------------------------------------------------------------


def _made(path: str, call: str, make: Callable[[], Any]) -> Any:
    with _importing_beside(path):
        try:
            return make()
        except Exception as error:
            raise FormatError(f"{path}: {call} failed: {_with_line(error, path)}") from error


def _with_line(error: BaseException, path: str) -> str:
    """The error with the line of the file at `path` that raised it."""
    return f"{type(error).__name__}: {error}{_line_text(error, path)}"


def _line_text(error: BaseException, path: str) -> str:
    file = os.path.abspath(path)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" (line {lines[-1]})" if lines else ""


def _made_without_weights(make: Callable[[], _Model], path: str, say: Callable[[str], None]) -> _Model:
    """What `make` of the file at `path` returns on the meta device, or with weights if it fails there.

    `say` gets a sentence if the file loads weights, instead of PyTorch's warnings, one per weight, which advise to load
    them after all; or the reason why the weights are made.
    """
    try:
        with torch.device("meta"), copies_to_meta() as not_loaded:
            model = make()
        if not_loaded:
            say(f"{path} loads weights: they are left out here, because only their shapes are needed")
        return model
    except Exception as error:  # such as by asking a tensor without numbers for one
        reason = error.__cause__ if isinstance(error, FormatError) and error.__cause__ else error
    model = make()  # an error that it raises again is shown once
    first_line = f"{type(reason).__name__}: {reason}".splitlines()[0]
    say(f"{path}: the model was made with its weights, because it cannot be made without them: {first_line}")
    return model


@cache
def _say_once(sentence: str) -> None:
    print(sentence, file=sys.stderr)


@contextmanager
def _importing_beside(path: str) -> Iterator[None]:
    """Modules beside the file at `path` can be imported, as with `python path`."""
    folder = os.path.dirname(os.path.abspath(path))
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
