"""Writes docs/schedules.md and its pictures: `make docs`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from textwrap import fill

from rota import Cluster, Costs, Plan, simulate
from rota.drawing import save
from rota.schedules import FAMILIES, Family, compare_schedules
from rota.schedules.table import to_text

FOLDER = Path(__file__).parent
NUM_RANKS, NUM_MICROBATCHES = 8, 24
WIDTH = 140  # of the page
#: For each family the paper, and when it is a good choice.
PAPER_AND_USE = {
    "gpipe": (
        "Huang et al. 2019",
        "Few micro-batches and plenty of memory, or as the baseline that every paper compares with.",
    ),
    "1f1b": (
        "Narayanan et al. 2021",
        "The default of most trainers: rank r holds p − r micro-batches, even in a long step.",
    ),
    "eager_1f1b": (
        "Zhuang et al. 2022",
        "Transfers take about as long as ops, and twice the memory of 1f1b is free.",
    ),
    "interleaved_1f1b": (
        "Narayanan et al. 2021 (Megatron-LM)",
        "Few micro-batches per rank, fast links, and enough layers for several stages per rank.",
    ),
    "looped_bfs": (
        "Lamy-Poirier 2023",
        "Sharded weights (FSDP): a stage's weights are gathered once for all micro-batches.",
    ),
    "zb_h1": (
        "Qi et al. 2023",
        "The backward can be split: the memory of 1f1b, and a third of its bubble if F = I = W.",
    ),
    "zb_h2": (
        "Qi et al. 2023",
        "Twice the memory of 1f1b is free, and F, I and W are about equal.",
    ),
    "interleaved_zb": (
        "Qi et al. 2023",
        "Interleaved stages where the backward can be split.",
    ),
    "zb_v": (
        "Qi et al. 2024",
        "As much memory as 1f1b, and F, I and W about equal: almost no bubble.",
    ),
    "v_half": (
        "Qi et al. 2024",
        "Activations limit you: about half of 1f1b's memory, for a small bubble.",
    ),
    "v_min": (
        "Qi et al. 2024",
        "Activations limit you severely: about a third of 1f1b's memory, for a larger bubble.",
    ),
    "dualpipe_v": (
        "DeepSeek-AI 2024",
        "Long messages to hide behind ops of the other direction, and memory for one copy of the weights.",
    ),
    "dualpipe": (
        "DeepSeek-AI 2024",
        "Like dualpipe_v, with memory for two copies of the weights; mixtures of experts with long messages.",
    ),
    "chimera": (
        "Li and Hoefler 2021",
        "No more micro-batches than ranks, and memory for two copies of the weights.",
    ),
    "hanayo": (
        "Liu et al. 2023",
        "Few micro-batches, a whole backward, and memory for one copy of the weights.",
    ),
    "varuna": (
        "Athlur et al. 2022",
        "Recomputation in every stage is needed anyway, and links are slow or uneven.",
    ),
    "seq1f1b": (
        "Sun et al. 2024",
        "Long samples of a causal model: less memory and less bubble than 1f1b with whole samples.",
    ),
    "forward_only": (
        "none",
        "Inference and evaluation.",
    ),
}
ZERO_BUBBLE = 'Qi, Wan, Huang and Lin, "Zero Bubble Pipeline Parallelism", 2023'
#: The citations of families that share a file with families of other papers. The others cite in their file's docstring.
CITATIONS = {
    "1f1b": 'Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019, section 3.2, in '
    'the synchronous form of Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush), '
    "2021, section 3.3.",
    "eager_1f1b": 'Zhuang et al., "On Optimizing the Communication of Model Parallelism", 2022, section 4: twice as '
    "many forwards in the warm-up hide transfers.",
    "seq1f1b": 'Sun et al., "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language Model '
    'Training", 2024, section 3.2: the queue between forwards and backwards gives back the earliest sample, and of '
    "that sample the last chunk.",
    "interleaved_1f1b": 'Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using '
    'Megatron-LM", 2021, section 2.2.',
    "looped_bfs": 'Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2023, section 4.',
    "interleaved_zb": f"{ZERO_BUBBLE}, section 2: W fills what is left.",
    "zb_h1": f"{ZERO_BUBBLE}, section 2: H1 keeps the memory of 1F1B.",
    "zb_h2": f"{ZERO_BUBBLE}, section 2: H2 takes up to twice as much memory as 1F1B, and has no bubble at all when "
    "F = I = W.",
    "zb_v": f"{ZERO_BUBBLE}, section 6. The chain runs down the ranks and back up. The rank that a micro-batch enters "
    "first is the one that it leaves last, and both its backwards start early.",
    "forward_only": "Not from a paper.",
}
HEAD = f"""<!-- Written by `make docs`; change docs/make_schedules.py instead. -->
# The named schedules

A schedule is a function `(placement, num_microbatches) -> Plan`. `rota plan all` compares them for your sizes and
costs:

    rota plan all --ranks {NUM_RANKS} --microbatches {NUM_MICROBATCHES} --forward-us 1000 --backward-us 1000 \\
        --weight-us 1000 --activation 2kB

```text
{{table}}
```

A rank's work is divided evenly among its stages. Rota refuses times with fewer µs than a rank has stages. By default,
F takes 1 ms, B takes 2 ms, and F keeps 1 kB.

- "bubble" is the idle share of makespan × ranks, here and everywhere in Rota.
- "idle (paper)" is the idle time of one rank according to the formula. "idle" is the simulated idle time of the rank
  that idles least. Both count the makespan, except for `zb_h2` and `zb_v`: there, they count the span (the busy window
  of one rank).
- The formulas are from the papers, except for four, which we derived: `dualpipe` and `dualpipe_v` (where DeepSeek's
  report lets F and B overlap), `chimera` for different F and B, and `hanayo`.
- The backward is split if the paper splits it, and whole otherwise. If it must be split but was measured whole, each
  part gets half of its time, and `rota plan` says so.

[own-schedule.md](own-schedule.md) shows how to write your own.

## All of them

This table is for 4 ranks and 8 micro-batches; per rank F takes 1 ms and the backward 2 ms. "Bubble" is the idle share
of makespan × ranks. "Memory" is the activations of the fullest rank as a share of 1F1B's. In `zb_h2` and `zb_v`, ranks
have no idle time between their first and last op here. Their bubble comes from ranks that start and end at different
times.

{{overview}}
"""


def main() -> None:
    for family in FAMILIES:
        picture(family)
    (FOLDER / "schedules.md").write_text(page())


def page() -> str:
    """The text of docs/schedules.md."""
    costs = Costs.uniform(NUM_RANKS, 1000, 1000, 1000, activation_bytes=2000)
    table = to_text(compare_schedules(costs, Cluster.uniform(NUM_RANKS), NUM_MICROBATCHES))
    return "\n".join([HEAD.format(table=table, overview=overview()), *map(section, FAMILIES)])


def overview() -> str:
    """A row per schedule: how it compares with the others in a small step, and when to use it."""
    timelines = {family.name: simulate(small_plan(family)) for family in FAMILIES}
    usual_bytes = max(timelines["1f1b"].peak_memory_bytes)
    rows = ["| schedule | bubble | memory | when to use it | paper |", "|---|---|---|---|---|"]
    for family in FAMILIES:
        timeline = timelines[family.name]
        paper, use_when = PAPER_AND_USE[family.name]
        memory = f"{max(timeline.peak_memory_bytes) / usual_bytes:.0%}"
        rows.append(
            f"| [{family.name}](#{family.name}) | {timeline.bubble_fraction:.0%} | {memory} | {use_when} | {paper} |"
        )
    return "\n".join(rows)


def section(family: Family) -> str:
    """What the function's docstring says, when to use it, and its paper."""
    module = sys.modules[family.schedule.__module__].__doc__ or ""
    citation = CITATIONS.get(family.name) or module.strip().split("\n\n")[1]
    summary, _, sections = (family.schedule.__doc__ or "").partition("Args:")
    arguments = dict(re.findall(r"(\w+): (.*(?:\n {12}.*)*)", sections))
    paragraphs = [
        summary,
        f"**When to use it:** {PAPER_AND_USE[family.name][1]}",
        f"**Paper:** {citation}",
        f"**Placement:** {arguments['placement']} **Micro-batches:** {arguments['num_microbatches']} "
        f"**Function:** `rota.schedules.{family.schedule.__name__}`.",
        f"![{family.name}](pictures/{family.name}.png)",
    ]
    wrapped = [fill(" ".join(text.split()), WIDTH, break_on_hyphens=False) for text in paragraphs]
    return "\n\n".join([f"## {family.name}", *wrapped]) + "\n"


def small_plan(family: Family) -> Plan:
    """4 ranks, 8 micro-batches; F takes 1 ms and the backward 2 ms per rank, split as in the paper."""
    costs = family.costs_from(Costs.uniform(4, 1000, 1000, 1000, activation_bytes=12_000))
    placement = family.place(costs, Cluster.uniform(4))
    return family(placement.in_chunks(4, 8) if family.name == "seq1f1b" else placement, 8)


def picture(family: Family) -> None:
    """The small plan of a family."""
    save(simulate(small_plan(family)), str(FOLDER / "pictures" / f"{family.name}.png"))


if __name__ == "__main__":
    main()
