"""`rota demo`."""

from __future__ import annotations

from rota.cli import common, files
from rota.cli.command import Options, command
from rota.cli.requirements import require


@command("rota demo")
@common.count("--steps", default=20, help="number of training steps (default: 20)")
@common.output("FOLDER", "folder for the demo's files (default: rota-demo)", default="rota-demo", writes="folder")
def demo(options: Options) -> None:
    """Take a quick tour: plan a small GPT, train it, compare the run with the plan, and explain its idle time."""
    require("torch", "torch")
    from rota.demo.walkthrough import run_demo

    files.make_folder(options.output)
    run_demo(options.output, options.steps)
