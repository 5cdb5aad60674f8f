"""What `rota export` and `rota import` take, format by format."""

from __future__ import annotations

import argparse

#: What a model needs to have stages there, and that not every model does.
TITAN_LEAVES_NONE = (
    "In a stage, torchtitan puts None in the place of modules that other stages have: the model's forward must pass "
    "over them, as those of torchtitan's own models do."
)


def export(parser: argparse.ArgumentParser) -> None:
    formats = parser.add_subparsers(metavar="FORMAT", dest="format", required=True)
    titan = _format(
        formats,
        "torchtitan",
        "schedule.csv and the modules of each stage, as torchtitan's config names them",
        "rota export torchtitan plan.json --model model.py:make_model --cuts layers.2,layers.4,layers.6 -o titan",
        f" {TITAN_LEAVES_NONE}",
    )
    titan.add_argument("plan", help="plan.json, or a schedule CSV")
    titan.add_argument("--model", required=True, metavar="FILE.py:FUNCTION", help="a function that returns the model")
    told = (
        "its CutPoints to cut at, by number or name; without any, the modules that stages begin with (default: the "
        "plan's cuts; where it has none, CutPoints that are spread)"
    )
    titan.add_argument("--cuts", type=_words, metavar="NAME,…", help=told)
    titan.add_argument("-o", "--output", required=True, metavar="FOLDER", help="for the files; made if need be")
    megatron = _format(
        formats,
        "megatron",
        "--pipeline-model-parallel-layout: the layers of each stage",
        "rota export megatron plan.json --boundaries 0,4,6,8,10 -o layout.txt",
    )
    megatron.add_argument("plan", help="plan.json, or a schedule CSV")
    told = (
        "0, where each further stage begins, the number of layers; E, each t, each m and L count as one, or, with "
        "--layers, each of these (default: with --layers the plan's, where autoplan counted them)"
    )
    megatron.add_argument("--boundaries", type=_integers, metavar="0,N,…", help=told)
    told = "the layers' classes, in order; before the transformer layers is the embedding (E), behind them the loss (L)"
    megatron.add_argument("--layers", type=_layers, metavar="NAME*N,…", help=told)
    told = "for --layers: the transformer layers have this regular expression in their class's name"
    megatron.add_argument("--type", metavar="REGEX", help=told)
    megatron.add_argument("--mtp", type=int, default=0, metavar="N", help="layers of multi-token prediction")
    deepspeed = _format(
        formats,
        "deepspeed",
        "the boundaries of a PipelineModule's stages in its list of layers",
        "rota export deepspeed plan.json --layers 'Embed,Block*8,Norm,Head' --type block -o parts.json",
    )
    deepspeed.add_argument("plan", help="plan.json, or a schedule CSV")
    told = "0, where each further stage begins, the number of layers (default: the plan's, where autoplan counted them)"
    deepspeed.add_argument("--boundaries", type=_integers, metavar="0,N,…", help=told)
    told = "instead: as many layers in each stage whose class has this regular expression in its name"
    deepspeed.add_argument("--type", metavar="REGEX", help=told)
    deepspeed.add_argument(
        "--layers", type=_layers, metavar="NAME*N,…", help="for --type: the layers' classes, in order"
    )
    for sub in (megatron, deepspeed):
        sub.add_argument("-o", "--output", metavar="FILE", help="write it there")
    for sub in (titan, megatron, deepspeed):
        _force(sub)


def import_(parser: argparse.ArgumentParser) -> None:
    formats = parser.add_subparsers(metavar="FORMAT", dest="format", required=True)
    titan = _format(
        formats,
        "torchtitan",
        "a job config's parts and the schedule CSV beside it, as a plan",
        "rota import torchtitan titan/parallelism.toml --costs costs.json -o plan.json",
    )
    titan.add_argument("file", help="a job config's .toml, or a .json of parallelism's fields")
    megatron = _format(
        formats,
        "megatron",
        "a --pipeline-model-parallel-layout, as the plan that Megatron runs",
        "rota import megatron layout.txt --ranks 2 --microbatches 8 --costs costs.json -o plan.json",
    )
    megatron.add_argument("file", help="a text file with the layout alone, such as Et*3|(tt|)*29,m|L")
    megatron.add_argument("--ranks", type=int, required=True, help="Megatron's --pipeline-model-parallel-size")
    deepspeed = _format(
        formats,
        "deepspeed",
        "a PipelineModule's boundaries, as the plan that DeepSpeed runs",
        "rota import deepspeed parts.json --microbatches 8 --costs costs.json -o plan.json",
    )
    deepspeed.add_argument("file", help="a JSON list, such as [0, 4, 8]: PipelineModule.parts")
    for sub in (megatron, deepspeed):
        sub.add_argument("--microbatches", type=int, required=True, help="micro-batches a step")
    for sub in (titan, megatron, deepspeed):
        told = "costs of the stages, or of their layers (default: F 1 ms, B 2 ms per stage)"
        sub.add_argument("--costs", metavar="FILE", help=told)
        sub.add_argument("-o", "--output", metavar="FILE", help="write the plan as JSON")
        _force(sub)


def _format(
    formats: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str, example: str, more: str = ""
) -> argparse.ArgumentParser:
    description, epilog = f"{summary[0].upper()}{summary[1:]}.{more}", f"example:\n  {example}"
    form = argparse.RawDescriptionHelpFormatter
    return formats.add_parser(name, help=summary, description=description, epilog=epilog, formatter_class=form)


def _force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="write over what exists")


def _words(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise argparse.ArgumentTypeError(f"{text!r} has nothing between two commas; write such as a,b")
    return words


def _integers(text: str) -> list[int]:
    words = _words(text)
    for word in words:
        if not (word.isascii() and word.isdecimal() and len(word) < 10):
            raise argparse.ArgumentTypeError(f"{word!r} in {text!r} is no number of layers; write such as 0,4,8")
    return [*map(int, words)]


def _layers(text: str) -> list[str]:
    layers: list[str] = []
    for word in _words(text):
        name, star, times = word.partition("*")
        if not name or (star and not (times.isascii() and times.isdecimal() and len(times) < 6)):
            raise argparse.ArgumentTypeError(f"{word!r} is no layer; write such as Block, or Block*8 for eight of them")
        layers += [name] * (int(times) if star else 1)
    return layers
