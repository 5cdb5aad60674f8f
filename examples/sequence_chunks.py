"""Long samples in chunks: a causal GPT with 1F1B on whole samples, and with Seq1F1B on four chunks of each.

rota plan 1f1b --ranks 4 --microbatches 8 -o plan.json
rota run plan.json examples/sequence_chunks.py     a length may follow, 512 without

Gradients are compared with those of the unsplit model, in float64. Then steps are timed, and the memory that each rank
holds is measured and compared with what the plan says.
"""

import sys
import time

import torch
from torch import nn
from torch.nn import functional

import rota

WIDTH, HEADS, WORDS, SAMPLES, NUM_CHUNKS = 64, 4, 128, 8, 4
LENGTH = int(sys.argv[1]) if len(sys.argv) > 1 else 512
NUM_STEPS = 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norms[0](x)).chunk(3, dim=-1))
        k, v = rota.with_earlier_chunks(k, v)
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=x.device).tril(k.shape[-2] - q.shape[-2])
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, words):
        start = rota.chunk_start()
        return self.words(words) + self.places.weight[start : start + words.shape[1]]


def stages():
    torch.manual_seed(0)
    parts = [[Block() for _ in range(2)] for _ in range(4)]
    parts[0].insert(0, Words())
    parts[3].append(nn.Linear(WIDTH, WORDS))
    return rota.Stages([nn.Sequential(*part).double() for part in parts])


def loss_fn(output, targets):
    """Sum and count: chunks count by their tokens."""
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def expected_gradients(inputs, targets):
    whole = stages()
    for x, y in zip(inputs, targets, strict=True):
        loss, _ = loss_fn(whole.run(x[None]), y[None])
        (loss / targets.numel()).backward()
    return {name: parameter.grad for name, parameter in whole.named_parameters()}


def of_first_rank(text):
    """All ranks plan with the same costs."""
    size = torch.tensor(len(text.encode()))
    torch.distributed.broadcast(size, 0)
    data = torch.frombuffer(bytearray(text.encode().ljust(int(size))[: int(size)]), dtype=torch.uint8)
    torch.distributed.broadcast(data, 0)
    return bytes(data.tolist()).decode()


def measured(pipeline, plan, batch, expected):
    """Seconds per step, the most bytes alive on this rank, and the largest difference between gradients."""
    for parameter in pipeline.parameters():
        parameter.grad = None
    pipeline.step(*batch, plan=plan)
    difference = max(float((p.grad - expected[name]).abs().max()) for name, p in pipeline.named_parameters())
    seconds = []
    for _ in range(NUM_STEPS):
        begun = time.perf_counter()
        pipeline.step(*batch, plan=plan)
        seconds.append(time.perf_counter() - begun)
    with pipeline.watch_memory() as watch:
        pipeline.step(*batch, plan=plan)
    return sorted(seconds)[NUM_STEPS // 2], watch.peak_bytes, difference


def main():
    torch.set_num_threads(1)
    base = rota.given_plan()
    cluster, model = base.placement.cluster, stages()
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(WORDS, (SAMPLES, LENGTH + 1), generator=generator)
    batch = words[:, :-1].contiguous(), words[:, 1:].contiguous()
    one = [part[:1] for part in batch]

    def placed(num_chunks):
        costs = rota.profile_chunks(model, *one, loss_fn, num_chunks=num_chunks, repeats=3)
        costs = [rota.Costs.from_json(of_first_rank(each.to_json())) for each in costs]
        class_of = [*range(num_chunks)] * SAMPLES
        sample_of = [m // num_chunks for m in range(num_chunks * SAMPLES)]
        return rota.Placement.of_classes([rota.place(each, cluster) for each in costs], class_of, sample_of)

    rota.mesh()  # joins the other processes
    plans = {
        "1f1b": rota.schedules.one_f_one_b(placed(1), SAMPLES),
        "seq1f1b": rota.schedules.seq1f1b(placed(NUM_CHUNKS), SAMPLES * NUM_CHUNKS),
    }
    expected = expected_gradients(*batch)
    with rota.Pipeline(model, base, loss_fn) as pipeline:
        for name, plan in plans.items():
            seconds, peak_bytes, difference = measured(pipeline, plan, batch, expected)
            timeline, rank = rota.simulate(plan), pipeline.rank
            planned = timeline.peak_memory_bytes[rank] - plan.placement.static_bytes[rank]
            found = torch.tensor([difference, peak_bytes / planned, peak_bytes], dtype=torch.float64)
            torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
            if rank == 0:
                print(f"{name}: gradients differ from the unsplit model's by {float(found[0]):.1e} at most")
                print(f"{name}: {seconds * 1000:.0f} ms per step, planned {timeline.makespan_us / 1000:.0f} ms")
                share = float(found[1])
                print(f"{name}: {float(found[2]) / 1e6:.1f} MB at most on a rank, {share:.2f} of the planned peak")


if __name__ == "__main__":
    main()
