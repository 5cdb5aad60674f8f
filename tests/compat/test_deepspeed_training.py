"""The deepspeed door trains: any cut, schedule and layers, as the unsplit model does."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from compat.test_deepspeed_schedule import AllForwardsFirst
from rota import PipelineError
from rota.compat.deepspeed import LayerSpec, PipelineModule, TiedLayerSpec, initialize
from rota.compat.deepspeed.schedule import TrainSchedule
from rota.compat.deepspeed.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from support.pages import run
from support.pool import Pool, on_ranks
from support.sampling import swept

VOCABULARY, WIDTH, TOKENS, ROWS, NUM_MICROBATCHES, NUM_STEPS = 11, 6, 5, 2, 4, 3
BASE_SEED = 77
Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Takes and returns a pair; counts how often it is built with memory for its weights."""

    built = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width, dtype=torch.float64), nn.Dropout(0.2)
        Block.built += not self.linear.weight.is_meta

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, first = pair
        return x + self.dropout(torch.tanh(self.linear(x))), first


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x


def join(pair: tuple[Tensor, Tensor]) -> Tensor:
    return pair[0] + pair[1]


def project(embedding: nn.Embedding, x: Tensor) -> Tensor:
    return x @ embedding.weight.T


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def layers() -> list[Any]:
    embedding: Any = ("embed", nn.Embedding, VOCABULARY, WIDTH)
    return [
        TiedLayerSpec(*embedding, dtype=torch.float64),
        twice,
        *[LayerSpec(Block, WIDTH) for _ in range(4)],
        join,
        LayerSpec(nn.LayerNorm, WIDTH, dtype=torch.float64),
        TiedLayerSpec(*embedding, dtype=torch.float64, forward_fn=project),
    ]


def batches(seed: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_STEPS, NUM_MICROBATCHES, 2, ROWS, TOKENS)
    tokens = torch.randint(VOCABULARY, shape, generator=generator).flatten(0, 1)
    return [(x, y) for x, y in tokens]


class Serial:
    """The same layers on one process, in plain PyTorch."""

    def __init__(self) -> None:
        self.modules: list[Any] = []
        for i, layer in enumerate(layers()[:-1]):
            torch.manual_seed(BASE_SEED + i)
            self.modules.append(layer.build() if isinstance(layer, LayerSpec) else layer)
        self.parameters = [p for m in self.modules if isinstance(m, nn.Module) for p in m.parameters()]
        self.offset = 0

    def loss(self, pair: Batch) -> Tensor:
        self.offset += 1
        value: Any = pair[0]
        for i, module in enumerate(self.modules):
            torch.manual_seed(BASE_SEED * self.offset + i)
            value = module(value)
        return loss_fn(project(self.modules[0], value), pair[1])

    def train(self) -> tuple[list[float], list[float]]:
        """Losses of the steps, and of an evaluation after each."""
        optimizer = torch.optim.Adam(self.parameters, lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        trained, evaluated = [], []
        for step in range(NUM_STEPS):
            of_step = batches(1)[step * NUM_MICROBATCHES : (step + 1) * NUM_MICROBATCHES]
            losses = [self.loss(pair) / NUM_MICROBATCHES for pair in of_step]
            for loss in losses:
                loss.backward()
            trained.append(sum(loss.item() for loss in losses))
            nn.utils.clip_grad_norm_(self.parameters, 0.3)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            self.set_training(False)
            with torch.no_grad():
                of_step = batches(2)[step * NUM_MICROBATCHES : (step + 1) * NUM_MICROBATCHES]
                evaluated.append(sum(self.loss(pair).item() for pair in of_step) / NUM_MICROBATCHES)
            self.set_training(True)
        return trained, evaluated

    def set_training(self, training: bool) -> None:
        for module in self.modules:
            if isinstance(module, nn.Module):
                module.train(training)


def module_of(num_stages: int, **options: Any) -> PipelineModule:
    return PipelineModule(layers(), num_stages, loss_fn=loss_fn, seed_layers=True, base_seed=BASE_SEED, **options)


CASES: list[tuple[dict[str, Any], Any]] = [
    ({"partition_method": "parameters"}, TrainSchedule),
    ({"partition_method": "type:block", "activation_checkpoint_interval": 2}, AllForwardsFirst),
]


def train(rank: int, num_stages: int) -> list[Any]:
    """For each case: losses and evaluations, the cut, and how many blocks were built."""
    results = []
    for options, schedule in CASES:
        Block.built = 0
        state = torch.get_rng_state()
        module = module_of(num_stages, **options)
        assert torch.equal(state, torch.get_rng_state())
        optimizer = torch.optim.Adam(module.parameters(), lr=0.05) if [*module.parameters()] else None
        scheduler = optimizer and torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        config = {"gradient_accumulation_steps": NUM_MICROBATCHES, "gradient_clipping": 0.3}
        engine, *_ = initialize(model=module, optimizer=optimizer, lr_scheduler=scheduler, config=config)
        engine.schedule = schedule
        training, evaluation = iter(batches(1)), iter(batches(2))
        at_an_end = module.mpu().is_first_stage or module.mpu().is_last_stage
        trained, evaluated = [], []
        for _ in range(NUM_STEPS):
            trained.append(engine.train_batch(data_iter=training if at_an_end else None).item())
            evaluated.append(engine.eval_batch(data_iter=evaluation if at_an_end else None).item())
        assert not any(p.is_meta for p in module.parameters())
        results.append((trained, evaluated, module.parts, Block.built))
        module.close()
    return results


@pytest.mark.parametrize("num_stages", [swept(1), 2, 3, swept(4)])
def test_training_and_evaluation_equal_the_unsplit_models(pool: Pool, num_stages: int) -> None:
    trained, evaluated = Serial().train()
    for by_case in zip(*pool.run(num_stages, train, num_stages), strict=True):
        for rank, (its_trained, its_evaluated, parts, built) in enumerate(by_case):
            assert its_trained == pytest.approx(trained, abs=1e-10)
            assert its_evaluated == pytest.approx(evaluated, abs=1e-10)
            assert built == sum(2 <= i < 6 for i in range(parts[rank], parts[rank + 1]))  # those that live here
            assert parts == by_case[0][2]


# --- modules as they are, gradients of one's own, stages without layers ----------------------------------------------


def shared_modules() -> list[Any]:
    torch.manual_seed(3)
    first, last = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    last.weight = first.weight
    return [first, nn.Tanh(), last]


def pairs() -> list[Batch]:
    generator = torch.Generator().manual_seed(4)
    return [(x, y) for x, y in torch.randn(4, 2, 3, 4, generator=generator, dtype=torch.float64)]


def gradients(rank: int) -> dict[str, Tensor]:
    """Twice, with another number of micro-batches; gradients add up as no optimizer clears them."""
    module = PipelineModule(nn.Sequential(*shared_modules()), 4, loss_fn=nn.MSELoss(), partition_method="uniform")
    assert module.parts == [0, 1, 2, 3, 3]
    data_iter = iter(pairs())
    for module.micro_batches in (1, 3):
        module.train_batch(data_iter)
    module.close()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def test_gradients_of_modules_that_share_weights(pool: Pool) -> None:
    serial = nn.Sequential(*shared_modules())
    one, *three = pairs()
    nn.MSELoss()(serial(one[0]), one[1]).backward()
    (sum(nn.MSELoss()(serial(x), y) for x, y in three) / 3).backward()
    by_rank = pool.run(4, gradients)
    assert [sorted(found) for found in by_rank] == [["0.bias", "0.weight"], [], ["2.bias", "2.weight"], []]
    for found in by_rank:
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, serial.get_parameter(name).grad, rtol=1e-10, atol=1e-10)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()


def replicas(rank: int) -> tuple[float, dict[str, tuple[Tensor, Tensor | None]]]:
    """Two pipelines of two stages; every process begins with other weights."""
    torch.manual_seed(rank)
    module = PipelineModule(network(), num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
    module.micro_batches = 2
    replica = module.mpu().data_parallel_id
    loss = module.train_batch(iter(pairs()[2 * replica : 2 * replica + 2])).item()
    module.close()
    return loss, {name: (p.detach(), p.grad) for name, p in module.named_parameters()}


def test_replicas_of_a_pipeline_module(pool: Pool) -> None:
    by_rank = pool.run(4, replicas)
    serial = network()
    serial.load_state_dict({name: p for _, found in by_rank for name, (p, _) in found.items()})
    losses = [nn.MSELoss()(serial(x), y) for x, y in pairs()]
    (sum(losses) / 4).backward()
    for loss, found in by_rank:
        assert loss == pytest.approx(sum(losses).item() / 4, abs=1e-12)
        for name, (_, gradient) in found.items():
            torch.testing.assert_close(gradient, serial.get_parameter(name).grad, rtol=1e-10, atol=1e-10)


@on_ranks(4)
def test_grids(rank: int) -> None:
    grid = PipelineParallelGrid(topology=ProcessTopology(axes=["pipe", "data"], dims=[2, 2]))
    assert grid._is_grid_valid()
    assert (grid.is_first_stage, grid.is_last_stage) == (rank < 2, rank >= 2)
    for group, ranks in (
        (grid.get_pipe_parallel_group(), grid.pp_group),
        (grid.get_data_parallel_group(), grid.dp_group),
        (grid.get_slice_parallel_group(), [rank]),
        (grid.get_model_parallel_group(), grid.pp_group),
    ):
        total = torch.tensor([rank])
        dist.all_reduce(total, group=group)
        assert total.item() == sum(ranks)
        assert rank in ranks
    assert [grid.stage_to_global(stage_id=1, data=i) for i in (0, 1)] == [2, 3]
    assert [grid.stage_to_global(stage_id=stage) for stage in (0, 1)] == [rank % 2, 2 + rank % 2]
    assert grid.p2p_groups == [[0, 2], [1, 3], [2, 0], [3, 1]]
    assert grid.mesh.mesh_dim_names == ("pp", "dp")
    assert PipelineParallelGrid().topology().dims == [2, 2]
    grid = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1))
    assert (grid.get_slice_parallel_rank(), grid.get_slice_parallel_world_size()) == (rank % 2, 2)
    assert (grid.get_model_parallel_rank(), grid.get_model_parallel_world_size()) == (rank, 4)
    dist.barrier()  # who leaves early would close connections that others are still making


def cuts_and_refusals(rank: int) -> list[int]:
    sample = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    measured = module_of(2, partition_method="profile", profile_input=sample)
    measured.micro_batches = 2
    with pytest.raises(PipelineError, match="data_iter ended after 1 of 2 micro-batches"):
        measured._load(iter(batches(1)[:1]))
    for make, message in (
        (lambda: PipelineModule([nn.ReLU()]), "needs num_stages or a topology"),
        (lambda: PipelineModule([nn.ReLU()], 3), "num_stages is 3, which does not divide the 2 processes"),
        (lambda: PipelineModule([nn.ReLU()], 1, PipeDataParallelTopology(2, 1)), "the topology has 2; give"),
        (
            lambda: module_of(2, partition_method="profile", profile_input=sample.double()),
            "measuring the layers failed on the first process",
        ),
        (measured.train_batch, f"stage {rank} reads the batch, but data_iter is None"),
    ):
        with pytest.raises(PipelineError, match=message):
            make()
    measured.close()
    dist.barrier()
    return measured.parts


def test_measured_cuts_and_refusals(pool: Pool) -> None:
    parts, other = pool.run(2, cuts_and_refusals)
    assert parts == other
    assert (parts[0], parts[-1]) == (0, 9)


@on_ranks(1)
def test_training_of_the_docs_runs(rank: int) -> None:
    data_iter = iter([(torch.ones(2, 8), torch.ones(2, 1))] * 8)
    names: dict[str, Any] = {"data_iter": data_iter}
    run("coming-from-earlier-systems.md#DeepSpeed", 0, names)
    with names["engine"].pipeline:
        assert names["engine"].train_batch(data_iter).item() < names["loss"].item()
