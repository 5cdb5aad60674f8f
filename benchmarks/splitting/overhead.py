"""Time and memory of `rota.split` for unmodified models, and a stage's forward against one written by hand."""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import torch
from by_hand import Middle
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import rota

NUM_STAGES, ROUNDS, REPEATS = 4, 30, 10


def model_of(num_layers: int) -> LlamaForCausalLM:
    """Small enough that Python's time is seen."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, num_hidden_layers=num_layers, use_cache=False, **sizes))


def best_ms(*runs: Callable[[], Any]) -> list[float]:
    """The least mean time of `REPEATS` runs, of each in turn, so that a disturbance meets all."""
    best = [float("inf")] * len(runs)
    for _ in range(ROUNDS):
        for number, run in enumerate(runs):
            start = time.process_time()
            for _ in range(REPEATS):
                run()
            best[number] = min(best[number], (time.process_time() - start) / REPEATS * 1e3)
    return best


def measure(num_layers: int) -> str:
    """One line of the table."""
    model = model_of(num_layers)
    ids = torch.randint(0, 60, (2, 8))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    longer = {name: torch.ones(2, 11, dtype=torch.long) for name in batch}
    stages = rota.split(model, NUM_STAGES, example=batch)
    split_ms = statistics.median(timed_ms(lambda: rota.split(model, NUM_STAGES, example=batch)) for _ in range(5))
    record_ms = statistics.median(timed_ms(lambda: recorded(model, batch)) for _ in range(5))
    tracemalloc.start()
    kept = rota.split(model, NUM_STAGES, example=batch)
    megabytes = tracemalloc.get_traced_memory()[0] / 1e6
    tracemalloc.stop()
    del kept
    size = num_layers // NUM_STAGES
    received, longer_received = (stages.call(1, [stages.call(0, [], one)[1]], one)[2] for one in (batch, longer))
    hand, x = Middle(model, range(2 * size, 3 * size)), received[f"model.layers.{2 * size - 1}"]
    assert torch.equal(
        hand(x, batch["attention_mask"]), stages.call(2, [received], batch)[3][f"model.layers.{3 * size - 1}"]
    )
    hand_ms, stage_ms = best_ms(lambda: hand(x, batch["attention_mask"]), lambda: stages.call(2, [received], batch))
    first_ms = timed_ms(lambda: stages.call(2, [longer_received], longer)) - stage_ms
    return (
        f"{num_layers:6}  {split_ms:8.0f}  {record_ms:18.0f}  {megabytes:9.1f}  {hand_ms:10.2f}  {stage_ms:8.2f}  "
        f"{stage_ms - hand_ms:7.2f}  {first_ms:24.1f}"
    )


def print_table() -> None:
    """One line per number of layers."""
    torch.set_num_threads(1)
    print("layers  split ms  of it recording ms  python MB  by hand ms  stage ms  more ms  first at a new length ms")
    for num_layers in (8, 32, 80):
        print(measure(num_layers), flush=True)


def recorded(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """Recording alone, as `split` does it first."""
    from rota.models.carving.recorder import record

    record(model, [f"model.layers.{number}" for number in range(model.config.num_hidden_layers)], batch)


def timed_ms(run: Callable[[], Any]) -> float:
    """The process's own time of one run."""
    start = time.process_time()
    run()
    return (time.process_time() - start) * 1e3
