"""LoRA: a small GPT-2 learns the prose of Python's manual; then adapters alone learn its tables of character codes.

rota plan 1f1b --ranks 2 --microbatches 4 -o plan.json
rota run plan.json examples/finetune_lora.py     or with a number of steps after it, 200 without

Needs `transformers` and `peft`: pip install 'rota[examples]'
"""

import encodings
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import rota

NUM_STEPS, LENGTH = int(sys.argv[1]) if len(sys.argv) > 1 else 200, 64
SIZES = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 64, "n_layer": 4, "n_head": 4}


def loss_fn(output, tokens):
    return torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def train(model, text: str, lr: float, folder: str):
    """Train what requires gradients, on the bytes of `text`, and save the model in `folder`."""
    rows = torch.tensor(list(text.encode())).unfold(0, LENGTH, LENGTH)
    plan = rota.given_plan()
    stages = rota.split(model.train(), plan.num_stages, example={"input_ids": rows[:2]})
    with rota.Pipeline(stages, plan, loss_fn, mesh=rota.mesh()) as pipeline:
        trained = [parameter for parameter in pipeline.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=lr)
        loader = DataLoader(rows, 32, sampler=pipeline.sampler(rows), drop_last=True)  # the same rows on both ranks
        for step, batch in zip(range(NUM_STEPS), loader, strict=False):
            loss = pipeline.step({"input_ids": batch}, batch)
            pipeline.clip_grad_norm_(1.0)  # of the whole model
            optimizer.step()
            optimizer.zero_grad()
            if pipeline.rank == pipeline.replica == 0 and step % 10 == 0:
                print(f"step {step}: loss {loss:.3f}, training {sum(p.numel() for p in trained):,} weights on rank 0")
        if weights := rota.gather_weights(pipeline):  # the whole model's, on rank 0 only
            model.save_pretrained(folder, state_dict=weights)
        torch.distributed.barrier()  # the other ranks may read it now


def main():
    torch.manual_seed(0)  # the same weights on every rank
    model = GPT2LMHeadModel(GPT2Config(**SIZES, bos_token_id=None, eos_token_id=None))
    train(model, "\n".join(topics.values()), lr=3e-3, folder="prose")  # it keeps this rank's stages only
    adapters = LoraConfig(r=8, lora_alpha=32, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
    tables = "".join(file.read_text() for file in sorted(Path(encodings.__file__).parent.glob("cp*.py")))
    train(get_peft_model(GPT2LMHeadModel.from_pretrained("prose"), adapters), tables, lr=1e-2, folder="adapters")


if __name__ == "__main__":
    main()
