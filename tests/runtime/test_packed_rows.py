"""Samples packed into rows, each attending only to itself: every gradient is that of the samples one by one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rota
from rota import Cluster, Costs, Pipeline, PipelineError, pack_samples, packed_attention, place, use_packed_attention
from rota.models.packing import _of_transformers
from rota.schedules import one_f_one_b
from support.hf_models import VOCABULARY, decoder, gpt2
from support.networks import clear
from support.pool import Pool

#: Models, and how exact they are: Llama computes its norms and rotations in float32, whatever its dtype.
MODELS = {"Llama": 1e-6, "GPT2": 1e-10}


def causal(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = gpt2(2) if name == "GPT2" else decoder(name, 2)
    return model.double().train()


def samples(lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (length + 1,), generator=generator) for length in lengths]


def summed_loss(output: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    loss = functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss, (targets != -100).sum()


def unsplit(name: str, batch: list[Tensor]) -> tuple[float, dict[str, Tensor | None]]:
    """As transformers runs it, sample by sample, with its own attention and without padding."""
    model = causal(name)
    total, count = 0.0, sum(len(sample) - 1 for sample in batch)
    for sample in batch:
        loss, _ = summed_loss(model(sample[None, :-1]), sample[None, 1:])
        (loss / count).backward()
        total += loss.item()
    return total / count, {key: parameter.grad for key, parameter in model.named_parameters()}


def steps(rank: int, given: list[list[Tensor]], round_to: int) -> list[Any]:
    found = []
    base = one_f_one_b(place(Costs.uniform(2), Cluster.uniform(2)), 2)
    for name in MODELS:
        model = causal(name)
        use_packed_attention(model)
        example = pack_samples(given[0][:2])[0]
        with Pipeline(rota.split(model, 2, example=example), base, summed_loss, check_data="never") as pipeline:
            planner = rota.Planner(
                pipeline,
                given,
                pack_samples,
                "support.token_budget:plan",
                length_of=lambda sample: -(-(len(sample) - 1) // round_to) * round_to,
                packed=True,
                options={"num_ranks": 2, "tokens": 40},
            )
            for batch in planner:
                assert all(rows == 1 and length % round_to == 0 for rows, length in batch.sizes)
                clear(pipeline)
                loss = pipeline.step(batch.inputs, batch.targets, plan=batch.plan, sizes=batch.sizes)
                gradients = {key: parameter.grad for key, parameter in pipeline.named_parameters()}
                found.append((loss, gradients, sum(len(group) > 1 for group in batch.groups)))
    return found


@pytest.mark.parametrize("round_to", [pytest.param(1, marks=pytest.mark.sweep), 8])
def test_gradients_are_those_of_the_samples_one_by_one(pool: Pool, round_to: int) -> None:
    given = [samples([5, 12, 1, 3, 9, 20]), samples([7, 7, 30, 2, 2]), samples([4, 18, 11])]
    by_rank = pool.run(2, steps, given, round_to)
    assert sum(packed for *_, packed in by_rank[0]) > 3
    cases = [(name, batch) for name in MODELS for batch in given]
    for i, (name, batch) in enumerate(cases):
        (loss, gradients), exact = unsplit(name, batch), MODELS[name]
        found = {key: gradient for of_rank in by_rank for key, gradient in of_rank[i][1].items()}
        assert all(abs(of_rank[i][0] - loss) < exact for of_rank in by_rank)
        torch.testing.assert_close(found, gradients, rtol=exact, atol=exact)


def test_rows_are_packed_and_padded() -> None:
    inputs, targets = pack_samples([torch.tensor([1, 2, 3]), torch.tensor([4, 5]), torch.tensor([6, 7, 8, 9])], 8)
    assert inputs["input_ids"].tolist() == [[1, 2, 4, 6, 7, 8, 0, 0]]
    assert inputs["position_ids"].tolist() == [[0, 1, 0, 0, 1, 2, 0, 1]]
    assert targets.tolist() == [[2, 3, 5, 7, 8, 9, -100, -100]]
    with pytest.raises(PipelineError, match="have 3 positions together, but the row has 2"):
        pack_samples([torch.tensor([1, 2, 3, 4])], 2)
    with pytest.raises(PipelineError, match=r"sample 1 has the shape \[1\]"):
        pack_samples([torch.tensor([1, 2]), torch.tensor([4])])


def test_heads_are_shared_and_samples_are_apart() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 6, 3), torch.randn(1, 2, 6, 3), torch.randn(1, 2, 6, 3)
    places = torch.arange(6)[None]
    for starts in ([0], [0, 2], [0, 2, 3]):
        places[0, starts[-1] :] = torch.arange(6 - starts[-1])
        own = torch.tensor([sum(i >= start for start in starts) for i in range(6)])
        mask = (own[:, None] == own) & torch.ones(6, 6, dtype=torch.bool).tril()
        whole = functional.scaled_dot_product_attention(
            q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), mask, scale=0.5
        )
        torch.testing.assert_close(packed_attention(q, k, v, places, scale=0.5), whole)


def test_what_would_not_be_exact_is_refused() -> None:
    q = torch.randn(1, 2, 4, 3)
    with pytest.raises(PipelineError, match=r"position_ids\[0, 2\] is 3"):
        packed_attention(q, q, q, torch.tensor([[0, 1, 3, 4]]))
    with pytest.raises(PipelineError, match="give one row"):
        packed_attention(q, q, q, torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]]))
    with pytest.raises(PipelineError, match="for 3 positions"):
        packed_attention(q, q, q, torch.tensor([[0, 1, 0]]))
    with pytest.raises(PipelineError, match="does not take attention functions from outside"):
        use_packed_attention(nn.Linear(2, 2))
    places, attention = torch.arange(4)[None], nn.Identity()
    with pytest.raises(PipelineError, match="Identity has sliding_window, which packed attention does not do"):
        _of_transformers(attention, q, q, q, None, position_ids=places, sliding_window=4)
    with pytest.raises(PipelineError, match="has attention_mask"):
        _of_transformers(attention, q, q, q, torch.ones(1, 1, 4, 4, dtype=torch.bool), position_ids=places)
    with pytest.raises(PipelineError, match="does not pass position_ids on"):
        _of_transformers(attention, q, q, q, None, use_cache=True, softcap=None)
    attention.is_causal = False  # type: ignore[assignment]
    with pytest.raises(PipelineError, match="not causal"):
        _of_transformers(attention, q, q, q, None, position_ids=places)
