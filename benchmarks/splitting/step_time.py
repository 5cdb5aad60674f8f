"""The step of a pipeline on two processes: stages by `rota.split` against the same stages written by hand, in turn."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from by_hand import First, Last
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import rota
from rota.schedules import one_f_one_b

NUM_LAYERS, VOCABULARY, NUM_MICROBATCHES, LENGTH = 8, 1000, 4, 32
WARM_UP = 3
SPLIT, BY_HAND = "rota.split", "by hand"


def make_model() -> LlamaForCausalLM:
    """Llama with 8 layers of width 512: 26 million parameters."""
    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_attention_heads": 8, "num_key_value_heads": 8}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=NUM_LAYERS, use_cache=False, **sizes)
    return LlamaForCausalLM(config).train()


def make_batch(seed: int) -> dict[str, Tensor]:
    """One row per micro-batch, the last two tokens padding."""
    ids = torch.randint(VOCABULARY, (NUM_MICROBATCHES, LENGTH), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": (torch.arange(LENGTH) < LENGTH - 2).long().expand_as(ids).contiguous()}


def make_stages() -> dict[str, rota.Stages]:
    """The same cut twice, each with a model of its own."""
    middle = NUM_LAYERS // 2
    model = make_model()
    modules = [First(model, range(middle)), Last(model, range(middle, NUM_LAYERS))]
    inputs = [["input_ids", "attention_mask"], ["attention_mask"]]
    return {
        SPLIT: rota.split(make_model(), 2, [f"model.layers.{middle}"], example=make_batch(0)),
        BY_HAND: rota.Stages(modules, inputs=inputs, input_names=["input_ids", "attention_mask"]),
    }


def loss_fn(output: Any, targets: Tensor) -> Tensor:
    """Of the next tokens; the output is what the model returns, or logits."""
    logits = output if isinstance(output, Tensor) else output.logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def step_times(store: str, rank: int, num_steps: int) -> dict[str, list[tuple[float, float]]]:
    """For each of both, by step: seconds from barrier to barrier, and of this process's CPU."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    plan = one_f_one_b(rota.place(rota.Costs.uniform(2, 10, 20), rota.Cluster.uniform(2)), NUM_MICROBATCHES)
    pipelines = {name: rota.Pipeline(stages, plan, loss_fn) for name, stages in make_stages().items()}
    optimizers = {name: torch.optim.AdamW(pipeline.parameters(), lr=1e-4) for name, pipeline in pipelines.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in pipelines}
    for step in range(WARM_UP + num_steps):
        batch, losses = make_batch(step), []
        for name in (SPLIT, BY_HAND) if step % 2 else (BY_HAND, SPLIT):
            dist.barrier()
            before = time.perf_counter(), time.process_time()
            losses.append(pipelines[name].step(batch, batch["input_ids"]))
            optimizers[name].step()
            optimizers[name].zero_grad()
            cpu_s = time.process_time() - before[1]
            dist.barrier()
            if step >= WARM_UP:
                times[name].append((time.perf_counter() - before[0], cpu_s))
        assert abs(losses[0] - losses[1]) < 1e-4, losses
    for pipeline in reversed(pipelines.values()):
        pipeline.close()
    dist.destroy_process_group()
    return times


def print_comparison(num_steps: int) -> None:
    """Medians with quartiles, and the ratios of the steps that follow each other."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(2) as pool:
        store = f"file://{Path(folder, 'store')}"
        ranks = pool.starmap(step_times, [(store, rank, num_steps) for rank in range(2)], chunksize=1)
    wall = {name: [wall_s * 1e3 for wall_s, _ in ranks[0][name]] for name in (SPLIT, BY_HAND)}
    cpu = {name: [(a[1] + b[1]) * 1e3 for a, b in zip(*(r[name] for r in ranks), strict=True)] for name in wall}
    print(f"\n{num_steps} steps of each, in turn        median (quartiles)")
    for what, times in (("step ms", wall), ("CPU ms of both ranks", cpu)):
        for name in (SPLIT, BY_HAND):
            print(f"{what:22}{name:12}{spread(times[name], 1)}")
        ratios = [a / b for a, b in zip(times[SPLIT], times[BY_HAND], strict=True)]
        of_medians = median(times[SPLIT]) / median(times[BY_HAND])
        print(f"{what:22}{'ratio':12}{spread(ratios, 3)}; of the medians {of_medians:.3f}")


def spread(values: list[float], digits: int) -> str:
    """The median, and the quartiles around it."""
    low, _, high = quantiles(values, n=4)
    return f"{median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
