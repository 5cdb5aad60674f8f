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
    "intermediate_size": 3584,
    "num_hidden_layers": 18,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 16000,
    "tie_word_embeddings": False,
}
CUTS = ("model.layers.4", "model.layers.9", "model.layers.14")  # a fourth of the weights each
SMALL = {**SIZES, "hidden_size": 192, "intermediate_size": 512, "vocab_size": 1600}


def peak_bytes() -> int:
    """The most memory that this process has had so far."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def make_stage(sizes: dict[str, int], rank: int, folder: str | None) -> tuple[int, int]:
    """Bytes of all weights, and of those of this rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import rota

    torch.manual_seed(0)
    with rota.meta_init():
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    stages = rota.split(model, NUM_RANKS, CUTS, example={"input_ids": torch.ones(2, 8, dtype=torch.long)})
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
    found = {"imported": imported, "before": before, "peak": peak_bytes(), "whole": whole, "local": local}
    print(json.dumps({**found, "seconds": seconds}))


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
                added = found["peak"] - found["imported"]
                worst = max(worst, added / found["whole"])
                cells += [f"{added / 1e6:,.0f} MB", f"{added / found['whole']:.3f}", f"{found['seconds']:.1f}"]
            print(f"| {' | '.join(cells)} |")
    whole, imported, lazy = made["whole"], made["imported"], made["before"] - made["imported"]
    print(f"\nThe whole: {whole / 1e6:,.0f} MB. Worst {worst:.3f}, bar 0.35. Imports alone, not in these peaks:")
    print(f"{imported / 1e6:,.0f} MB; what is imported at first use, in these peaks: {lazy / 1e6:,.0f} MB.")
    print(f"Unsplit, the model is made in {unsplit['seconds']:.1f} s, with a peak of {unsplit['peak'] / 1e6:,.0f} MB.")


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        measure(int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
    elif sys.argv[1:2] == ["whole"]:
        write_model(sys.argv[2])
    else:
        main()
