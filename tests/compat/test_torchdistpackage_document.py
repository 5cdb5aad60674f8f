"""TorchDistPackage's document, as it stands: a ResNet cut into stages, trained and evaluated, on handwritten digits."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rota.compat.torchdistpackage import DDP, flatten_model, partition_uniform, tpc
from support import pages
from support.layered_models import Block
from support.pool import Pool

pytestmark = pytest.mark.dist

PARTITION = """
    layer_list = [
        'conv1', 'bn1', 'relu', 'maxpool', 'layer1', 'layer2', 'layer3', 'layer4', 'avgpool',
        lambda x: torch.flatten(x, 1), 'fc'
    ]
    flat_model = flatten_model(model, layer_list , return_list=True)
    md_list = partition_uniform(flat_model)
    model = torch.nn.Sequential(*md_list)

    model = DDP(model)
"""
TRAINING = """
from torchdistpackage.parallel.pipeline_sched import forward_backward, forward_eval
from torchdistpackage.parallel.clip_grad_parallel import clip_grad_norm_

    # adapted from DeiT
    for samples, targets in data_loader:
        dist.broadcast(samples, tpc.get_ranks_in_group('pipe')[0], tpc.get_group('pipe'))
        dist.broadcast(targets, tpc.get_ranks_in_group('pipe')[0], tpc.get_group('pipe'))

        loss=torch.rand(1).cuda()

        inputs = []
        if tpc.is_first_in_pipeline_group():
            inputs.append(samples)
        else:
            inputs.append(targets)

        # this line is not necessary, forward_backward will do it.
        optimizer.zero_grad()

        # an example of customized backward_fn
        def bwd_fn(output_obj, output_obj_grad):
            if output_obj_grad is None:
                model.backward(output_obj)
            else:
                model.backward_grad(output_obj, output_obj_grad)

        def fwd_fn(inputs):
            with torch.cuda.amp.autocast(dtype=torch.bfloat16):
                if tpc.is_first_in_pipeline_group():
                    out = model(inputs)
                    return out
                else:
                    out = model(inputs[0])
                    loss = criterion(samples, out, inputs[1])
                    # deal with loss ...
                    return loss

        num_microbatches=4
        forward_backward(
            optimizer,
            fwd_fn,
            None,   # for simple backward func like loss.backward, we can pass None
            inputs,
            num_microbatches=num_microbatches,
            forward_only=False,
            dtype=torch.bfloat16,
            scatter_gather_tensors=False)

        total_norm = clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
"""
EVALUATION = """
for images, target in data_loader:
    images = images.to(device, non_blocking=True)
    target = target.to(device, non_blocking=True)
    dist.broadcast(target, tpc.get_ranks_in_group('pipe')[0], tpc.get_group('pipe'))

    inputs = []
    if tpc.is_first_in_pipeline_group():
        inputs = images

    def eval_fwd(img):
        with torch.cuda.amp.autocast():
            return model(img)

    output = forward_backward(
        None,
        eval_fwd,
        None,
        inputs,
        num_microbatches=1,
        forward_only=True,
        dtype=torch.float16,
        scatter_gather_tensors=False)

    if tpc.is_last_in_pipeline_group():
        # compute output
        with torch.cuda.amp.autocast():
            loss = criterion(output, target)

        acc1, acc5 = accuracy(output, target, topk=(1, 5))
"""
#: What is changed: import lines, and what needs CUDA.
EDITS = {
    "from torchdistpackage.": "from rota.compat.torchdistpackage.",
    ".cuda()": "",
    "torch.cuda.amp.autocast(dtype=torch.bfloat16)": "torch.autocast('cpu', dtype=torch.bfloat16)",
    "torch.cuda.amp.autocast()": "torch.autocast('cpu')",
}


def run(text: str, names: dict[str, Any]) -> None:
    """The document's code, with what it leaves open in `names`; what it defines is added there."""
    for theirs, ours in EDITS.items():
        text = text.replace(theirs, ours)
    imports = [line for line in text.splitlines() if line.startswith("from ")]
    body = textwrap.dedent("\n".join(line for line in text.splitlines() if not line.startswith("from ")))
    exec(compile("\n".join([*imports, body]), "document", "exec"), names)


def run_example(rank: int) -> float:
    names: dict[str, Any] = {}
    pages.run("coming-from-earlier-systems.md#TorchDistPackage", 0, names)
    tpc.close()
    return names["norm"].item()


def test_the_example_of_the_docs(pool: Pool) -> None:
    one, other = pool.run(2, run_example)
    assert one == other > 0


class ResNet(nn.Module):
    """With the layers' names of a ResNet, for 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.conv1, self.bn1, self.relu = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        self.maxpool = nn.MaxPool2d(2)
        self.layer1, self.layer2 = nn.Sequential(Block(8, 8, 1)), nn.Sequential(Block(8, 8, 1))
        self.layer3, self.layer4 = nn.Sequential(Block(8, 16, 1)), nn.Sequential(Block(16, 16, 1))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def digits(num_batches: int, rows: int) -> list[tuple[Tensor, Tensor]]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    images = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    pairs = zip(images.split(rows), torch.tensor(y).split(rows), strict=True)
    return [pair for pair, _ in zip(pairs, range(num_batches), strict=False)]


def deit_criterion(samples: Tensor, out: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out, targets)


def accuracy(output: Tensor, target: Tensor, topk: tuple[int, ...]) -> list[float]:
    best = output.topk(max(topk)).indices == target[:, None]
    return [best[:, :k].any(1).float().mean().item() for k in topk]


def train_and_evaluate(rank: int, size: int, batches: list[tuple[Tensor, Tensor]]) -> tuple[Any, Any, Any]:
    tpc.setup_process_groups([("data", 1), ("pipe", size)])
    names: dict[str, Any] = {"torch": torch, "dist": dist, "tpc": tpc, "DDP": DDP, "__name__": "document"}
    names |= {"flatten_model": flatten_model, "partition_uniform": partition_uniform, "model": ResNet()}
    run(PARTITION, names)
    model = names["model"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    names |= {"data_loader": batches, "optimizer": optimizer, "criterion": deit_criterion, "max_norm": 1.0}
    run(TRAINING, names)
    model.eval()
    names |= {"criterion": nn.functional.cross_entropy, "accuracy": accuracy, "device": "cpu"}
    run(EVALUATION, names)
    tpc.close()
    evaluated = (names["loss"].item(), names["acc1"], names["acc5"]) if rank == size - 1 else None
    return [p.detach() for p in model.parameters()], names["total_norm"].item(), evaluated


def serial(rank: int, batches: list[tuple[Tensor, Tensor]]) -> tuple[Any, Any, Any]:
    """The same in one process: micro-batch by micro-batch, whose losses are added up."""
    model = ResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    norm = torch.zeros(())
    for samples, targets in batches:
        optimizer.zero_grad()
        for x, y in zip(samples.chunk(4), targets.chunk(4), strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    with torch.no_grad(), torch.autocast("cpu"):
        output = model(batches[-1][0])
        loss = nn.functional.cross_entropy(output, batches[-1][1])
    return (
        [p.detach() for p in model.parameters()],
        norm.item(),
        (loss.item(), *accuracy(output, batches[-1][1], (1, 5))),
    )


def test_the_documents_resnet(pool: Pool) -> None:
    pytest.importorskip("sklearn", reason="the handwritten digits come with scikit-learn")
    batches = digits(4, 32)
    by_rank = pool.run(2, train_and_evaluate, 2, batches)
    ((parameters, norm, (loss, acc1, acc5)),) = pool.run(1, serial, batches)
    trained = [parameter for of_rank, _, _ in by_rank for parameter in of_rank]
    assert len(trained) == len(parameters)
    for one, other in zip(trained, parameters, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for _, its_norm, _ in by_rank:
        assert its_norm == pytest.approx(norm, rel=1e-5)
    assert by_rank[1][2] == pytest.approx((loss, acc1, acc5), rel=1e-4)
    assert acc5 > 0.3
