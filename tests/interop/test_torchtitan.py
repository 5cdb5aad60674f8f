"""The modules of each stage, torchtitan's files as they are written and read, and what neither can be."""

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from docs.test_other_trainers import DEEPSPEED
from rota import Cluster, Costs, CutPoint, Plan, RotaError, Stages, interleaved, place, split
from rota.compat import deepspeed as door
from rota.core.plan import Usage
from rota.interop import module_parts, parts_beginning_with, torchtitan
from rota.schedules import NAMED
from support.plain_gpt import FOUR, GPT, batch_of, loss_fn, step_by_files
from support.pool import Pool

X = torch.ones(2, 2)


def marked(*blocks: int) -> GPT:
    return GPT(marks={str(block): CutPoint() for block in blocks})


def test_each_stage_names_its_modules() -> None:
    model = marked(0, 2, 4)
    words = batch_of(1)[0]
    assert module_parts(model, split(model, 4, example=words)) == FOUR
    assert parts_beginning_with(GPT(), ["layers.1", "layers.3", "layers.5"]) == FOUR
    assert module_parts(model, split(model, 1)) == (sum(FOUR, ()),)
    assert module_parts(model, split(model, 2, cuts=[1], example=words)) == (FOUR[0] + FOUR[1], FOUR[2] + FOUR[3])


class Model(nn.Module):
    """Two linear layers with a cut between them; `add` puts on what a test needs."""

    def __init__(self, add: Callable[[Any], None] = lambda model: None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.cut = CutPoint()
        add(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.b(self.cut(self.middle(self.a(x)))))

    def middle(self, x: Tensor) -> Tensor:
        return x

    def end(self, x: Tensor) -> Tensor:
        return x


class Shared(Model):
    """Both stages call the same module."""

    def middle(self, x: Tensor) -> Tensor:
        result: Tensor = self.shared(x)
        return result

    end = middle


class InnerCut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.cut, self.two = nn.Linear(2, 2), CutPoint(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.two(self.cut(self.one(x)))
        return result


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(2, 2), nn.ModuleList([InnerCut(), InnerCut()])
        self.cut = CutPoint()

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.first(x))
        result: Tensor = self.blocks[1](self.cut(x))
        return result


def test_what_holds_no_parameters_may_be_in_several_parts() -> None:
    model: nn.Module = Model()
    assert module_parts(model, split(model, 2, example=X)) == (("a", "cut"), ("b",))
    model = Shared(lambda model: setattr(model, "shared", nn.Dropout(0.0)))
    assert module_parts(model, split(model, 2, example=X)) == (("a", "cut", "shared"), ("b", "shared"))


def test_a_cut_inside_of_a_module_is_refused_by_name_and_one_that_is_not_made_is_no_cut() -> None:
    model = Outer()
    assert module_parts(model, split(model, 2, cuts=["cut"], example=X)) == (
        ("first", "blocks.0", "cut"),
        ("blocks.1",),
    )
    with pytest.raises(RotaError, match=r"stages 0, 1 share 'blocks.0' \(InnerCut\): a cut is inside of it, .* first"):
        module_parts(model, split(model, 2, cuts=["blocks[0].cut"], example=X))


def of_linear(model: Any) -> None:
    model.shared = nn.Linear(2, 2)


def tie(model: Any) -> None:
    model.b.weight = model.a.weight


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (Model(lambda model: setattr(model, "scale", nn.Parameter(torch.ones(2)))), "parameter 'scale' belongs to the"),
        (Model(of_linear), "no stage calls 'shared' (Linear), which has parameters: remove it"),
        (Shared(of_linear), "parameter shared.weight of part 1 is tied to shared.weight of part 0"),
        (Model(tie), "parameter b.weight of part 1 is tied to a.weight of part 0, and torchtitan sums no gradients"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "an nn.Sequential calls each of its children"),
    ],
)
def test_models_that_torchtitan_cannot_cut(model: nn.Module, told: str) -> None:
    with pytest.raises(RotaError, match=re.escape(told)):
        module_parts(model, split(model, 2, example=X))


def test_stages_and_names_that_do_not_fit_the_model() -> None:
    a, b, c = (nn.Linear(2, 2) for _ in range(3))
    model = Model()
    with pytest.raises(RotaError, match="torchtitan runs a chain of stages, but these have the edges 0 -> 2, 1 -> 2"):
        module_parts(model, Stages([a, b, c], edges=[(0, 2), (1, 2)]))
    with pytest.raises(RotaError, match="parameter 'weight' of a stage is not the model's of that name: make stages"):
        module_parts(model, Stages([model.a, model.b]))
    with pytest.raises(RotaError, match=r"no 'layer\.2' that a part can begin with.* did you mean 'layers\.2'\?"):
        parts_beginning_with(GPT(), ["layer.2"])
    with pytest.raises(RotaError, match=r"'layers\.1' cannot begin a part: it is not after 'layers\.3'"):
        parts_beginning_with(GPT(), ["layers.3", "layers.1"])
    with pytest.raises(RotaError, match="'tok_embeddings' cannot begin a part"):
        parts_beginning_with(GPT(), ["tok_embeddings"])


def a_plan(name: str = "interleaved_1f1b", num_ranks: int = 2, costs: Costs | None = None) -> Plan:
    family = NAMED[name]
    return family(family.place(costs or family.adapted(Costs.uniform(4)), Cluster.uniform(num_ranks)), 4)


@pytest.mark.parametrize(
    ("name", "num_ranks"), [("1f1b", 4), ("interleaved_1f1b", 2), ("interleaved_zb", 2), ("zb_v", 2), ("dualpipe_v", 2)]
)
def test_what_is_exported_is_loaded_again(tmp_path: Path, name: str, num_ranks: int) -> None:
    plan = a_plan(name, num_ranks)
    written = torchtitan.export(FOUR, plan, tmp_path / "new" / "titan é")
    assert [path.name for path in written] == [*torchtitan.FILES]
    loaded = torchtitan.load(tmp_path / "new" / "titan é" / "parallelism.json")
    assert loaded.parts == FOUR
    assert loaded.plan.orders == plan.orders
    assert loaded.boundaries == (0, 2, 4, 6, 9)
    (tmp_path / "moved").mkdir()
    for path in written:
        path.rename(tmp_path / "moved" / path.name)
    layers = Costs(forward_us=tuple(range(1, 10)), backward_us=tuple(range(2, 20, 2)))
    loaded = torchtitan.load(tmp_path / "moved" / "parallelism.json", layers)
    assert [task.duration_us for task in loaded.plan.placement.tasks[:4]] == [3, 7, 11, 24]


def test_the_files_say_what_torchtitan_reads(tmp_path: Path) -> None:
    torchtitan.export(FOUR, a_plan("zb_v"), tmp_path)
    fields = json.loads((tmp_path / "parallelism.json").read_text())
    parts = [[*names] for names in FOUR]
    common = {
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "ZBVZeroBubble",
        "pipeline_parallel_schedule_csv": (tmp_path / "schedule.csv").as_posix(),
        "pipeline_parallel_microbatch_size": 1,
    }
    named = {"pipeline_parallel_module_fqns_per_model_part": parts}
    assert fields == {**common, "num_pp_microbatches": 4, **named}
    assert (tmp_path / "schedule.csv").read_text() == a_plan("zb_v").to_csv()


def test_replicas_are_written_as_degrees_of_data_parallelism(tmp_path: Path) -> None:
    planned = replace(a_plan(), usage=Usage(("a", "b", "c"), microbatch_rows=8, num_replicas=2))
    *_, config = torchtitan.export(FOUR, planned, tmp_path)
    fields = json.loads(config.read_text())
    assert (fields["data_parallel_replicate_degree"], fields["data_parallel_shard_degree"]) == (1, 2)
    assert torchtitan.batch_text(planned) == (
        "4 micro-batches of 8 rows each in each of 2 pipelines: set training.local_batch_size = 32 "
        "(global batch: 2 * 32 = 64 rows)"
    )
    assert torchtitan.degrees_text(planned).startswith(
        "2 pipelines: data_parallel_replicate_degree * data_parallel_shard_degree must be 2;"
    )
    assert torchtitan.load(config).num_replicas == 2
    config.write_text(change(config.read_text(), data_parallel_replicate_degree=2))
    assert torchtitan.load(config).num_replicas == 4
    for left_open in (-1, None):
        config.write_text(change(config.read_text(), data_parallel_shard_degree=left_open))
        assert torchtitan.load(config).num_replicas is None
    config.write_text(change(config.read_text(), data_parallel_shard_degree=0))
    with pytest.raises(RotaError, match=r"parallelism\.data_parallel_shard_degree is 0; expected"):
        torchtitan.load(config)


@pytest.mark.parametrize(
    ("plan", "parts", "told"),
    [
        (a_plan(), (*FOUR[:3], ("out put",)), "part 3 has 'out put', which is not a module's name, such as layers.0"),
        (
            NAMED["gpipe"](place(Costs.uniform(4), Cluster.uniform(2), [0, 0, 1, 1]), 2),
            FOUR,
            "the plan's stages are on the ranks 0, 0, 1, 1; torchtitan puts stage i on rank i mod 2",
        ),
        (
            NAMED["forward_only"](interleaved(Costs.uniform(4), Cluster.uniform(2)).forward_only(), 2),
            FOUR,
            "the plan has only forwards, but torchtitan trains",
        ),
        (
            NAMED["gpipe"](place(Costs.uniform(4, edges=[(0, 1), (0, 2), (1, 3), (2, 3)]), Cluster.uniform(4)), 2),
            FOUR,
            "is for a chain",
        ),
        (Plan(a_plan().placement, 4, a_plan().orders[::-1]), FOUR, "rank 0 does 1F0, but stage 1 is on rank 1"),
    ],
)
def test_what_is_not_exported_leaves_no_file(tmp_path: Path, plan: Plan, parts: Any, told: str) -> None:
    with pytest.raises(RotaError, match=re.escape(told)):
        torchtitan.export(parts, plan, tmp_path / "titan")
    assert not (tmp_path / "titan").exists()


def change(config: str, **fields: object) -> str:
    """The JSON with fields changed; None removes one."""
    document = json.loads(config) | fields
    return json.dumps({name: value for name, value in document.items() if value is not None})


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"pipeline_parallel_degree": 4}, "the CSV has 2 lines for pipeline_parallel_degree = 4"),
        ({"pipeline_parallel_schedule": "DualPipeV"}, 'for "DualPipeV" torchtitan puts them on 0, 1, 1, 0; change'),
        ({"pipeline_parallel_schedule_csv": None}, "names no schedule; set pipeline_parallel_schedule_csv"),
        ({"pipeline_parallel_schedule_csv": "x/other.csv"}, "other.csv: No such file or directory; check the path"),
        ({"pipeline_parallel_module_fqns_per_model_part": None}, "has neither of pipeline_parallel_module_fqns_per"),
        ({"module_fqns_per_model_part": [["a"]]}, "has both of pipeline_parallel_module_fqns_per_model_part and"),
        ({"pipeline_parallel_module_fqns_per_model_part": [["a"]]}, "the CSV runs 4 stages, but there are 1 parts"),
        ({"pipeline_parallel_schedule_csv": "a\x1b[2J"}, "printa"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, fields: dict[str, object], told: str) -> None:
    *_, config = torchtitan.export(FOUR, a_plan(), tmp_path)
    config.write_text(change(config.read_text(), **fields))
    with pytest.raises(RotaError, match=re.escape(told)) as error:
        torchtitan.load(config)
    assert len(str(error.value)) < 1000 + len(str(config))
    assert str(error.value).isprintable()


def test_a_schedule_is_read_from_beside_its_config_alone(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.csv").write_text(a_plan().to_csv())
    (tmp_path / "titan").mkdir()
    *_, config = torchtitan.export(FOUR, a_plan(), tmp_path / "titan")
    for named in (str(tmp_path / "elsewhere.csv"), "../elsewhere.csv"):
        config.write_text(change(config.read_text(), pipeline_parallel_schedule_csv=named))
        with pytest.raises(RotaError, match=r"cannot read .*titan/elsewhere.csv"):
            torchtitan.load(config)


# --- what is exported to torchtitan trains as the unsplit model does, on PyTorch's runtime and by its files alone -----


NUM_MICROBATCHES = 4


@pytest.mark.parametrize(("name", "num_ranks"), [("1f1b", 4), ("interleaved_1f1b", 2), ("zb_v", 2)])
def test_a_gpt_of_four_stages_trains_by_the_files_alone(pool: Pool, tmp_path: Path, name: str, num_ranks: int) -> None:
    family = NAMED[name]
    placement = family.place(family.adapted(Costs.uniform(4)), Cluster.uniform(num_ranks))
    model = GPT(marks={str(block): CutPoint() for block in (0, 2, 4)})
    stages = split(model, 4, example=batch_of(1)[0])
    torchtitan.export(module_parts(model, stages), family(placement, NUM_MICROBATCHES), tmp_path)

    by_rank = pool.run(num_ranks, step_by_files, str(tmp_path / "parallelism.json"), NUM_MICROBATCHES)

    whole = GPT()
    inputs, targets = batch_of(2 * NUM_MICROBATCHES)
    loss = loss_fn(whole(inputs), targets)
    loss.backward()
    losses = [loss for losses, _ in by_rank for loss in losses]
    assert len(losses) == NUM_MICROBATCHES
    assert abs(sum(losses) / NUM_MICROBATCHES - loss.item()) <= 1e-10
    theirs = {name: gradient for _, gradients in by_rank for name, gradient in gradients.items()}
    assert sum(len(gradients) for _, gradients in by_rank) == len(theirs)
    ours = dict(whole.named_parameters())
    assert theirs.keys() == ours.keys()
    for parameter, gradient in theirs.items():
        torch.testing.assert_close(gradient, ours[parameter].grad, rtol=1e-10, atol=1e-10)


def stage_by_the_page(rank: int, folder: str) -> list[Any]:
    """The page's code with Rota's door in DeepSpeed's place: this stage's layers, and a step's loss."""
    os.chdir(folder)
    space: dict[str, Any] = {"__name__": "example"}
    sys.modules.update({"deepspeed": door, "deepspeed.pipe": door})
    exec(compile(DEEPSPEED, "docs/other-trainers.md", "exec"), space)
    del sys.modules["deepspeed"], sys.modules["deepspeed.pipe"]  # patch.dict would forget what the code imports
    specs = [door.LayerSpec(nn.Linear, width, width + 1) for width in range(1, 6)]
    net = space["planned"](specs, loss_fn=nn.MSELoss())
    engine, *_ = door.initialize(model=net, config={"optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    loss = engine.train_batch(iter([(torch.ones(2, 1), torch.zeros(2, 6))]))
    os.chdir("/")
    return [[layer.in_features for layer in net.forward_funcs[0].layers], float(loss)]


def test_the_page_s_way_into_deepspeed(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "parts.json").write_text("[0, 2, 2, 5]")
    by_rank = pool.run(3, stage_by_the_page, str(tmp_path))
    assert [widths for widths, _ in by_rank] == [[1, 2], [], [3, 4, 5]]
    assert len({loss for _, loss in by_rank}) == 1
