"""Peak memory of a process that makes, or loads, one of four stages of a Llama with 2 GB of weights."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

NUM_RANKS = 4
SIZES = {
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 16000,
    "tie_word_embeddings": False,
}
SMALL = {**SIZES, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1600}


def peak_bytes() -> int:
    """The most memory that this process has had so far."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def make_stage(sizes: dict[str, int], rank: int, folder: str | None) -> tuple[int, int]:
    """Bytes of all weights, and of those of this rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import rota

    torch.manual_seed(0)
    with rota.deferred_init(to_load=folder is not None):
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    stages = rota.split(model, NUM_RANKS, example={"input_ids": torch.ones(2, 8, dtype=torch.long)})
    if folder is None:
        rota.materialize(stages, [rank])
    else:
        rota.load_pretrained(stages, [rank], folder)
    whole, local = (sum(p.numel() * p.element_size() for p in of.parameters()) for of in (model, stages[rank]))
    return whole, local


def measure(rank: int, folder: str | None) -> None:
    """In a process of its own."""
    import transformers  # noqa: F401

    imported = peak_bytes()
    make_stage(SMALL, rank, None)  # loads what PyTorch and transformers import when they are first used
    before, began_s = peak_bytes(), time.perf_counter()
    whole, local = make_stage(SIZES, rank, folder)
    seconds = time.perf_counter() - began_s
    print(
        json.dumps(
            {
                "imported": imported,
                "before": before,
                "peak": peak_bytes(),
                "whole": whole,
                "local": local,
                "seconds": seconds,
            }
        )
    )


def write_model(folder: str) -> None:
    """The whole model, as a pretrained folder, in a process of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    began_s = time.perf_counter()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    seconds = time.perf_counter() - began_s
    model.save_pretrained(folder, max_shard_size="500MB")
    print(json.dumps({"peak": peak_bytes(), "seconds": seconds}))


def fresh(*arguments: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        unsplit = fresh("whole", folder)
        print("| rank | weights here | made: peak | of the whole | s | loaded: peak | of the whole | s |")
        print("|---|---|---|---|---|---|---|---|")
        worst = 0.0
        for rank in range(NUM_RANKS):
            made, loaded = fresh("rank", str(rank)), fresh("rank", str(rank), folder)
            cells = [str(rank), f"{made['local'] / made['whole']:.3f}"]
            for found in (made, loaded):
                share = (found["peak"] - found["imported"]) / found["whole"]
                worst = max(worst, share)
                cells += [
                    f"{(found['peak'] - found['imported']) / 1e6:,.0f} MB",
                    f"{share:.3f}",
                    f"{found['seconds']:.1f}",
                ]
            print(f"| {' | '.join(cells)} |")
    print()
    print(
        f"The whole: {made['whole'] / 1e6:,.0f} MB; above imports alone ({made['imported'] / 1e6:,.0f} MB). "
        f"Worst {worst:.3f}, bar 0.35. Lazy imports are {(made['before'] - made['imported']) / 1e6:,.0f} MB of each peak. "
        "Unsplit, the model is made in "
        f"{unsplit['seconds']:.1f} s."
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        measure(int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
    elif sys.argv[1:2] == ["whole"]:
        write_model(sys.argv[2])
    else:
        main()
