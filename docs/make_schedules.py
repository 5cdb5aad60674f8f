"""Writes docs/schedules.md and its pictures: `make docs`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from rota import Cluster, Costs, simulate
from rota.drawing import save
from rota.schedules import FAMILIES, Family, compare_schedules
from rota.schedules.table import to_text

FOLDER = Path(__file__).parent
NUM_RANKS, NUM_MICROBATCHES = 8, 24
HEAD = f"""# The named schedules

{{made}}

A family is a function `(placement, num_microbatches) -> Plan`. `rota schedules` compares them on your sizes and costs:

    rota schedules --ranks {NUM_RANKS} --microbatches {NUM_MICROBATCHES} --forward-us 1000 --backward-us 1000 \\
        --weight-us 1000 --activation 2kB

```
{{table}}
```

A rank's work is divided evenly among its stages; a time of fewer µs than stages is refused. By default, F lasts 1 ms,
B 2 ms, and F keeps 1 kB. "bubble" is the idle share of makespan × ranks, here and wherever Rota says
it. The columns behind it are for one rank: the idle time that a formula gives, beside what the simulator finds for the
rank that idles least: within the makespan, for `zb_h2` and `zb_v` within the span (the busy window of one rank). The
formulas are the papers' own, except for four: `dualpipe` and `dualpipe_v` (the report lets F and B overlap), `chimera`
for F unlike B, and `hanayo` are derived here. A backward that a paper does not split is whole here; one that it
splits, and that was measured whole, is halved. `rota plan` says so where it does that.

Write your own: [own-schedule.md](own-schedule.md).
"""


def main() -> None:
    costs = Costs.uniform(NUM_RANKS, 1000, 1000, 1000, activation_bytes=2000)
    table = to_text(compare_schedules(costs, Cluster.uniform(NUM_RANKS), NUM_MICROBATCHES))
    made = "*Table and pictures are made by `make docs`.*"
    parts = [HEAD.format(made=made, table=table)]
    for family in FAMILIES:
        picture(family)
        parts.append(section(family))
    (FOLDER / "schedules.md").write_text("\n".join(parts))


def section(family: Family) -> str:
    """The family's own words: the docstrings of its module and function."""
    module = sys.modules[family.schedule.__module__].__doc__ or ""
    citation = module.strip().partition("\n\n")[2].partition("\n\n")[0]
    summary, _, sections = (family.schedule.__doc__ or "").partition("Args:")
    says = " ".join(summary.split())
    arguments = {name: " ".join(text.split()) for name, text in re.findall(r"(\w+): (.*(?:\n {12}.*)*)", sections)}
    cite = " ".join(citation.split())
    return (
        f"## {family.name}\n\n{says}\n\n{cite or family.source}\n\nPlacement: {arguments['placement']} "
        f"Micro-batches: {arguments['num_microbatches']} Function: `rota.schedules.{family.schedule.__name__}`.\n\n"
        f"![{family.name}](pictures/{family.name}.png)\n"
    )


def picture(family: Family) -> None:
    """4 ranks, 8 micro-batches, F = I = W."""
    costs = family.adapted(Costs.uniform(4 * family.stages_per_rank, 1000, 1000, 1000, activation_bytes=1000))
    placement = family.place(costs, Cluster.uniform(4))
    plan = family(placement.in_chunks(4, 8) if family.name == "seq1f1b" else placement, 8)
    save(simulate(plan), str(FOLDER / "pictures" / f"{family.name}.png"))


if __name__ == "__main__":
    main()
