"""`rota demo`: split a model, profile it, plan, check, draw, run, and compare plan and run."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from rota.checking import check
from rota.comparison import compare
from rota.costs import Cluster
from rota.demo import train
from rota.demo.gpt import loss_fn
from rota.drawing import save, to_text
from rota.placing import place
from rota.profiling import profile
from rota.runtime.launching.launch import launch
from rota.schedules import one_f_one_b
from rota.simulation import simulate
from rota.units import size_text
from rota.writing import write_text

NUM_STAGES, NUM_MICROBATCHES = 4, 8


def run_demo(folder: str, steps: int) -> None:
    """Run the demo, and write costs.json, plan.csv, plan.json, timeline.json, timeline.html and plan.png.

    Args:
        folder: Where to write the files. plan.png needs Matplotlib, and is left out without it.
        steps: The number of training steps.
    """
    output = Path(folder)
    width = shutil.get_terminal_size((100, 24)).columns

    _heading(1, f"Cut: a GPT with 8 blocks and 7 CutPoints, into {NUM_STAGES} stages")
    stages = train.make_stages(NUM_STAGES)
    print(stages.table())

    _heading(2, "Profile")
    inputs, targets = train.Corpus(train.LENGTH).batch(train.ROWS // NUM_MICROBATCHES)
    costs = profile(stages, inputs, targets, loss_fn, report=print)
    print("stage   forward  backward   kept until the backward")
    for stage in range(NUM_STAGES):
        kept = size_text(costs.activation_bytes[stage])
        print(f"{stage:>5}{costs.forward_us[stage]:>8,} µs{costs.backward_us[stage]:>7,} µs   {kept}")

    _heading(3, f"Plan: 1F1B, {NUM_MICROBATCHES} micro-batches, checked")
    plan = one_f_one_b(place(costs, Cluster.uniform(NUM_STAGES)), NUM_MICROBATCHES)
    check(plan)
    planned = simulate(plan)
    print(to_text(planned, width))

    _heading(4, f"Run: {steps} steps on {NUM_STAGES} processes, on the sources of Python's standard library")
    measured = launch(plan, train.__file__, ["--steps", str(steps)]).timeline
    assert measured is not None, "the script has ended, so it has run its steps"

    _heading(5, "Compare: the plan against the last step")
    print(to_text(measured, width))
    print(compare(planned, measured).to_text())
    if "share" in costs.note:
        print(
            f"\n{costs.note}. Costs are measured with all ranks busy; in a run some ranks wait,\n"
            f"the others get more of the cores, and their ops are faster than planned."
        )

    written = {"costs.json": costs.to_json(), "plan.csv": plan.to_csv(), "plan.json": plan.to_json()}
    for name, text in (written | {"timeline.json": measured.to_json()}).items():
        write_text(output / name, text)
    save(measured, output / "timeline.html", above=planned, title="Demo: planned over measured")
    names = [*written, "timeline.json", "timeline.html"]
    if importlib.util.find_spec("matplotlib") is not None:
        save(planned, str(output / "plan.png"))
        names.append("plan.png")
    print(f"\nWritten to {output}/: {', '.join(names)}.")
    print(f"Next: open {output}/timeline.html in a browser; rota run {output}/plan.json YOUR_SCRIPT.py")


def _heading(number: int, text: str) -> None:
    print(f"\n{number}. {text}\n")
