"""Texts of any length: every batch is grouped and planned on its own, while the one before it runs.

rota plan 1f1b --ranks 4 --microbatches 8 -o plan.json
rota run plan.json examples/variable_lengths.py causal     a GPT; a number of batches may follow, 20 without
rota run plan.json examples/variable_lengths.py t5         an encoder and a decoder, as T5 has them

The texts are docstrings of Python's standard library, and bytes are the tokens. Gradients are compared with those of
the unsplit model, in float64; then three ways to make micro-batches of them are timed: padding all samples to
the longest of the batch, a fixed budget of tokens in the order of arrival (both with 1F1B), and rota.Planner.
"""

import ast
import os
import random
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import rota

WIDTH, HEADS, LONGEST, BATCH, IGNORED = 64, 4, 384, 48, -100
LENGTHS = (32, 160, LONGEST)  # that are profiled
NAME = sys.argv[1] if len(sys.argv) > 1 else "causal"
NUM_BATCHES = int(sys.argv[2]) if len(sys.argv) > 2 else 20


def docstrings() -> list[bytes]:
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:60]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text("utf-8"))))
    kinds = ast.FunctionDef, ast.ClassDef, ast.Module
    found = (ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds))
    return [text.encode()[: LONGEST - 64] for text in found if len(text) > 16]


def padded(rows: list[bytes], length: int, fill: int) -> torch.Tensor:
    result = torch.full((len(rows), length), fill)
    for i, row in enumerate(rows):
        result[i, : len(row)] = torch.tensor(list(row))
    return result


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, source, mask=None, is_causal=False):
        def heads(y):
            return y.unflatten(-1, (HEADS, -1)).transpose(1, 2)

        k, v = self.kv(source).chunk(2, dim=-1)
        y = functional.scaled_dot_product_attention(heads(self.q(x)), heads(k), heads(v), mask, is_causal=is_causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention to itself, to what is given besides, and an MLP."""

    def __init__(self, crosses: bool = False):
        super().__init__()
        self.itself, self.cross = Attention(), Attention() if crosses else None
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3 if crosses else 2))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, mask=None, is_causal=False, source=None):
        y = self.norms[0](x)
        x = x + self.itself(y, y, mask if source is None else None, is_causal)
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), source, mask)
        return x + self.mlp(self.norms[-1](x))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LONGEST, WIDTH)

    def forward(self, words):
        return self.words(words) + self.places.weight[: words.shape[1]]


# --- the models, in four stages ---------------------------------------------------------------------------------------


class CausalStage(nn.Module):
    def __init__(self, stage: int):
        super().__init__()
        self.words = Words() if stage == 0 else None
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 256) if stage == 3 else None

    def forward(self, x):
        x = x if self.words is None else self.words(x)
        for block in self.blocks:
            x = block(x, is_causal=True)
        return x if self.head is None else self.head(x)


class Causal:
    """A sample is a text; each byte is predicted from those before it."""

    def samples(self):
        return docstrings()

    def stages(self):
        return rota.Stages([CausalStage(stage) for stage in range(4)])

    def length_of(self, sample):
        return len(sample) - 1

    def collate(self, samples, length):
        inputs = padded([text[:-1] for text in samples], length, 0)
        return inputs, padded([text[1:] for text in samples], length, IGNORED)

    def of_length(self, rows, length):
        return self.collate([bytes(length + 1)] * rows, length)


class EncoderStage(nn.Module):
    def __init__(self, stage: int):
        super().__init__()
        self.words = Words() if stage == 0 else None
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, mask):
        x = x if self.words is None else self.words(x)
        for block in self.blocks:
            x = block(x, mask)
        return x


class DecoderStage(nn.Module):
    def __init__(self, stage: int):
        super().__init__()
        self.words = Words() if stage == 2 else None
        self.blocks = nn.ModuleList(Block(crosses=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, 256) if stage == 3 else None

    def forward(self, received, mask, words=None):
        x, source = (self.words(words), received) if self.words is not None else received
        for block in self.blocks:
            x = block(x, mask, is_causal=True, source=source)
        return (x, source) if self.head is None else self.head(x)


class EncoderDecoder:
    """A sample is a text and what to predict from it: its first line."""

    def samples(self):
        return [(text, b"\0" + text.split(b"\n")[0][:60]) for text in docstrings()]

    def stages(self):
        stages = [EncoderStage(0), EncoderStage(1), DecoderStage(2), DecoderStage(3)]
        return rota.Stages(stages, inputs={0: ["source", "mask"], 1: ["mask"], 2: ["mask", "target"], 3: ["mask"]})

    def length_of(self, sample):
        return len(sample[0]), len(sample[1]) - 1

    def collate(self, samples, length, target_length):
        texts = [text for text, _ in samples]
        mask = torch.arange(length) < torch.tensor([len(text) for text in texts])[:, None]
        inputs = {"source": padded(texts, length, 0), "mask": mask[:, None, None]}
        inputs["target"] = padded([target[:-1] for _, target in samples], target_length, 0)
        return inputs, padded([target[1:] for _, target in samples], target_length, IGNORED)

    def of_length(self, rows, length):
        of_target = min(max(length // 6, 1), 60)
        return self.collate([(bytes(length - of_target), bytes(of_target + 1))] * rows, length - of_target, of_target)


def loss_fn(output, labels):
    """Sum and count, so that every token weighs the same, however the samples are grouped."""
    return functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != IGNORED).sum()


# --- exactness and speed ----------------------------------------------------------------------------------------------


def lengths_of(task, sample):
    found = task.length_of(sample)
    return (found,) if isinstance(found, int) else found


def grouped(task, samples, groups):
    """Micro-batches of these groups of samples: inputs, targets and sizes."""
    sizes = [(len(g), *map(max, zip(*(lengths_of(task, samples[i]) for i in g), strict=True))) for g in groups]
    pairs = [task.collate([samples[i] for i in g], *size[1:]) for g, size in zip(groups, sizes, strict=True)]
    return [inputs for inputs, _ in pairs], [targets for _, targets in pairs], sizes


def by_budget(task, samples, tokens):
    """Groups in the order of arrival, each as large as the budget of tokens allows once it is padded."""
    groups, longest = [], 0
    for i, sample in enumerate(samples):
        longest = max(longest, sum(lengths_of(task, sample)))
        if not groups or (len(groups[-1]) + 1) * longest > tokens:
            groups.append([])
            longest = sum(lengths_of(task, sample))
        groups[-1].append(i)
    return groups


def largest_difference(task, plan, model, samples):
    """Between gradients of the pipeline and of the unsplit model, which gets the samples one by one, unpadded."""
    torch.manual_seed(0)
    whole = task.stages()
    for stage in whole.modules:
        stage.double()
    total, count = 0.0, 0
    for sample in samples:
        inputs, targets = task.collate([sample], *lengths_of(task, sample))
        loss, tokens = loss_fn(whole.run(inputs), targets)
        total, count = total + loss, count + int(tokens)
    (total / count).backward()
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    torch.manual_seed(0)
    stages = task.stages()
    for stage in stages.modules:
        stage.double()
    with rota.Pipeline(stages, plan, loss_fn) as pipeline:
        (batch,) = rota.Planner(pipeline, [samples], task.collate, model, length_of=task.length_of)
        pipeline.step(batch.inputs, batch.targets, plan=batch.plan, sizes=batch.sizes)
        found = torch.stack([(p.grad - expected[name]).abs().max() for name, p in pipeline.named_parameters()]).max()
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
        return float(found)


def timed(pipeline, optimizer, batches):
    """Seconds of the steps, with what they waited for their plans, without the first one, which warms up."""
    seconds = []
    for inputs, targets, given, waited_us in batches:
        begun = time.perf_counter()
        pipeline.step(inputs, targets, **given)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begun + waited_us / 1e6)
    return sum(seconds[1:])


def main():
    torch.set_num_threads(1)
    task = {"causal": Causal, "t5": EncoderDecoder}[NAME]()
    texts, plan = task.samples(), rota.given_plan()
    rng = random.Random(0)
    batches = [rng.sample(texts, BATCH) for _ in range(NUM_BATCHES + 1)]  # the first one warms up
    torch.manual_seed(0)
    stages = task.stages()
    rota.mesh()  # joins the other processes, so that all measure at once, as they will compute
    repeats = 1 if NUM_BATCHES < 5 else 3
    measured = []
    for length in LENGTHS:
        for rows in (1, 6):
            how = rota.StageProfileOptions(here=True, repeats=repeats)
            costs = rota.profile(stages, *task.of_length(rows, length), loss_fn, options=how)
            measured.append((rota.Size.padded([length] * rows), costs))
    model = rota.fit_sizes(measured)
    difference = largest_difference(task, plan, model, batches[0])
    base, num_tokens = plan.placement, [sum(sum(lengths_of(task, s)) for s in batch) for batch in batches]

    def padded_to_longest():
        size = -(-BATCH // plan.num_microbatches)
        groups = [[*range(i, min(i + size, BATCH))] for i in range(0, BATCH, size)]
        for batch in batches:
            longest = [max(of) for of in zip(*(lengths_of(task, s) for s in batch), strict=True)]
            pairs = [task.collate([batch[i] for i in group], *longest) for group in groups]
            of_batch = {"plan": fixed, "sizes": [(len(group), *longest) for group in groups]}
            yield [x for x, _ in pairs], [y for _, y in pairs], of_batch, 0

    def budgeted():
        for batch in batches:
            inputs, targets, sizes = grouped(task, batch, by_budget(task, batch, 2 * LONGEST))
            yield inputs, targets, {"plan": rota.schedules.one_f_one_b(base, len(sizes)), "sizes": sizes}, 0

    def planned():
        for batch in rota.Planner(pipeline, batches, task.collate, model, length_of=task.length_of):
            found.append(batch)
            yield batch.inputs, batch.targets, {"plan": batch.plan, "sizes": batch.sizes}, batch.waited_us

    found = []
    fixed = rota.schedules.one_f_one_b(base, plan.num_microbatches)
    with rota.Pipeline(stages, plan, loss_fn, check_data="never") as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
        ways = {"padded to the longest": padded_to_longest, "a budget of tokens": budgeted, "planned": planned}
        took = {name: timed(pipeline, optimizer, way()) for name, way in ways.items()}
        if pipeline.rank == 0:
            print(f"{NAME}: gradients differ from the unsplit model's by {difference:.1e} at most")
            for name, seconds in took.items():
                rate = sum(num_tokens[1:]) / seconds
                print(f"{name}: {rate:,.0f} tokens/s; planned takes {took['planned'] / seconds:.2f} of its time")
            predicted = sum(batch.makespan_us for batch in found[1:]) / 1e6
            waited = max(batch.waited_us for batch in found[1:]) / 1000
            print(f"predicted {predicted:.2f} s, measured {took['planned']:.2f} s; no step waited over {waited:.1f} ms")


if __name__ == "__main__":
    main()
