"""Varuna's page on CutPoints, as it stands, and the example of our page on it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.cut_point_models import GPT, batch, tied
from support.pages import python_blocks
from support.pool import Pool

pytestmark = pytest.mark.dist

SAMPLE_MODEL = """
    from varuna import CutPoint

    class SampleModel(nn.Module):
    def __init__(...):
        ....
        self.cutpoints = [CutPoint() for i in range(num_cutpoints)]
        ....

    def forward(input...):
        input = self.some_operation(input)
        input = self.cutpoints[0](input)     # marked as a potential stage boundary
        input = self.some_other_operation(input)
        ....
        for i in range(sub_modules):
        x = sub_module_i(input, ...)
        x = self.cutpoints[i+1](x)        # each cutpoint instance should be used only once in a model
        ....
"""
SHARED_WEIGHTS = """
    # list of 2-tuples with parameter names
    shared_weights = [("language_model.embedding.word_embeddings.weight","lm_head_weight")]   
    model = Varuna( model, args.stage_to_rank_map, dry_run_input, global_batch_size, 
                        args.chunk_size, args.fp16,
                        local_rank=args.local_rank, 
                        device=args.local_rank, 
                        shared_weights=shared_weights)  # passed to varuna init
"""  # noqa: W291
#: What is changed: import lines, indentation that Python refuses, and what the page elides.
EDITS = (
    ("from varuna import CutPoint", "from rota.compat.varuna import CutPoint"),
    (
        "    def __init__(...):\n        ....",
        "        def __init__(self, num_cutpoints, sub_modules):\n            super().__init__()\n            {made}",
    ),
    (
        "        self.cutpoints = [CutPoint() for i in range(num_cutpoints)]\n        ....",
        "            self.cutpoints = [CutPoint() for i in range(num_cutpoints)]",
    ),
    ("    def forward(input...):", "        def forward(self, input, target):"),
    ("        input = ", "            input = "),
    (
        "        ....\n        for i in range(sub_modules):",
        "            x = input\n            for i in range(self.sub_modules):",
    ),
    ("        x = sub_module_i(input, ...)", "                x = self.sub_module[i](x)"),
    ("        x = self.cutpoints[i+1](x)", "                x = self.cutpoints[i+1](x)"),
    ("        ....", "            return ((x - target) ** 2).mean()"),
)
MADE = """self.some_operation, self.sub_modules = nn.Linear(6, 6), sub_modules
            self.some_other_operation = torch.tanh
            self.sub_module = nn.ModuleList(nn.Linear(6, 6) for _ in range(sub_modules))"""


def sample_model() -> nn.Module:
    text = SAMPLE_MODEL
    for theirs, ours in EDITS:
        assert theirs in text
        text = text.replace(theirs, ours.replace("{made}", MADE))
    names: dict[str, Any] = {"nn": nn, "torch": torch, "__name__": "document"}
    exec(compile("if True:\n" + text, "document", "exec"), names)
    torch.manual_seed(7)
    made: nn.Module = names["SampleModel"](num_cutpoints=4, sub_modules=3)
    return made


def inputs(rows: int = 8) -> dict[str, Tensor]:
    x, target = torch.randn(2, rows, 6, generator=torch.Generator().manual_seed(9))
    return {"input": x, "target": target}


def documents(rank: int, folder: Path, example: str) -> Any:
    """Both snippets of the page on two stages, then our own page's example."""
    from rota.compat.varuna import Varuna

    sample = Varuna(sample_model(), "0;1;", inputs(2), 8, 2)
    first = sample.step(inputs())
    sample.close()
    args = Namespace(stage_to_rank_map="0;1;", chunk_size=2, fp16=False, local_rank=rank)
    names: dict[str, Any] = {"Varuna": Varuna, "args": args, "model": GPT(), "global_batch_size": 12}
    names["dry_run_input"] = batch(0, 2)
    exec(compile("if True:\n" + SHARED_WEIGHTS, "document", "exec"), names)
    second = names["model"].step(batch(0))
    names["model"].close()
    names = {"__name__": "example"}
    exec(compile(example.replace('"checkpoints"', repr(str(folder))), "example", "exec"), names)
    return first, second, (names["loss"], names["norm"])


def test_the_code_of_the_document_and_of_our_page(pool: Pool, tmp_path: Path) -> None:
    (example,) = python_blocks("coming-from-earlier-systems.md#Varuna")
    one, other = pool.run(2, documents, tmp_path, example)
    assert one == other
    first, second, (loss, norm) = one
    gpt = (tied(GPT(), 1), batch(0))
    for (its_loss, overflow, its_norm), (model, given) in ((first, (sample_model(), inputs())), (second, gpt)):
        wanted = model(**given)
        wanted.backward()
        assert not overflow
        assert its_loss == pytest.approx(wanted.item(), rel=2e-6)
        assert its_norm == pytest.approx(nn.utils.clip_grad_norm_(model.parameters(), 1e9).item(), rel=2e-6)
    assert 0 < loss < 4
    assert norm > 0
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-3"]
