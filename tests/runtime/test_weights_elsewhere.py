"""Once a pipeline is made, a rank has the weights of its own stages only, by the names that the whole model gives them.

The whole model is gathered on the first rank.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import rota
from rota import Cluster, Costs, PipelineError, Plan, Stages
from support.pool import on_ranks

IDS = torch.arange(8).reshape(4, 2)
GONE = r"was freed when the Pipeline was made.* rota.gather_weights\(pipeline\), or make another model"


def llama(*, tied: bool) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, tie_word_embeddings=tied, **sizes)).double().train()


def two_ranks(num_stages: int = 2) -> Plan:
    costs = Costs.uniform(num_stages)
    return rota.schedules.gpipe(rota.place(costs, Cluster.uniform(2), [stage % 2 for stage in range(num_stages)]), 2)


def own_loss(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output.loss
    return loss


def trained(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights after a step of the unsplit model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**batch).loss.backward()
    optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("tied", [False, True])
@on_ranks(2)
def test_the_whole_model_is_gathered_and_saved_for_transformers(rank: int, tmp_path: Path, tied: bool) -> None:
    batch = {"input_ids": IDS, "labels": IDS}
    model = llama(tied=tied)
    unsplit, other = copy.deepcopy(model), copy.deepcopy(model)
    output = model(**batch)  # its graph refers to weights that are freed
    stages = rota.split(model, 2, example=batch)
    with rota.Pipeline(stages, two_ranks(), own_loss) as pipeline:
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        pipeline.step(batch)
        optimizer.step()
        loss = pipeline.evaluate(batch)
        for use in (lambda: model(**batch), lambda: model.generate(IDS), lambda: model.save_pretrained(tmp_path)):
            with pytest.raises(PipelineError, match=GONE):
                use()
        with pytest.raises(PipelineError, match=GONE):
            rota.split(model, 2, example=batch)
        weights = rota.gather_weights(pipeline)
        local = {name for name, _ in pipeline.named_parameters()}
        assert {name for name, parameter in model.named_parameters() if not parameter.is_meta} >= local
    del output
    if rank:
        assert not weights
        return
    expected = trained(unsplit, batch)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert (weights[name] - value).abs().max() < 1e-10
    other.load_state_dict(weights)
    model.save_pretrained(tmp_path, state_dict=weights)
    for whole in (other, LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)):
        assert whole(**batch).loss.item() == pytest.approx(loss, abs=1e-10)
        assert whole.generate(IDS, max_new_tokens=2).shape == (4, 4)


class Marked(nn.Module):
    """Half of its weights are in an LSTM, which refers to them weakly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cut, self.second = nn.Linear(4, 4), rota.CutPoint(), nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.cut(self.first(x)))[0]
        return found


@on_ranks(2)
def test_weights_of_other_ranks_are_freed_and_refused(rank: int) -> None:
    plan = two_ranks()
    for model in (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Marked()):
        stages = rota.split(model, 2, example=torch.randn(1, 2, 4))
        with rota.Pipeline(stages, plan, nn.functional.mse_loss) as pipeline:
            pipeline.step(torch.randn(4, 2, 4), torch.randn(4, 2, 4))
            assert {p for p in model.parameters() if not p.is_meta} == {*pipeline.parameters()}
            with pytest.raises(PipelineError, match=GONE):
                model.state_dict()
            with pytest.raises(PipelineError, match=GONE):
                model(torch.randn(1, 2, 4))
            with pytest.raises(PipelineError, match=GONE):
                rota.split(model, 2)
        back = rota.schedules.gpipe(rota.place(Costs.uniform(2), Cluster.uniform(2), [1, 0]), 2)
        with pytest.raises(PipelineError, match=r"it was freed here: split a new model"):
            rota.Pipeline(stages, back, nn.functional.mse_loss)


@on_ranks(2)
def test_nothing_is_freed_where_a_rank_has_all_stages_or_they_are_made_by_hand(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    placement = rota.bidirectional(Costs.uniform(2), Cluster.uniform(2))
    with rota.Pipeline(rota.split(model, 2), rota.schedules.gpipe(placement, 2), nn.functional.mse_loss) as pipeline:
        pipeline.step(torch.randn(4, 4), torch.randn(4, 4))
        assert not any(p.is_meta for p in model.parameters())
        assert model(torch.randn(1, 4)).shape == (1, 4)
        assert len(rota.gather_weights(pipeline)) == (0 if rank else 4)
    with rota.Pipeline(Stages(model), two_ranks(), nn.functional.mse_loss) as pipeline:
        assert len(rota.gather_weights(pipeline)) == (0 if rank else 4)
        assert len(model.state_dict()) == 4
