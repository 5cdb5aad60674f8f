"""`rota rehearse`."""

from __future__ import annotations

from argparse import Namespace

from rota.cli import files
from rota.cli.commands import tell_replicas
from rota.cli.screen import show_progress


def rehearse(arguments: Namespace) -> int:
    planned = files.read_plan(arguments.plan)
    files.require("torch", "torch")
    from rota.planning.rehearsal import rehearse

    try:
        rehearsal = rehearse(
            planned,
            num_steps=arguments.steps,
            allocate=arguments.allocate,
            timeout_s=arguments.timeout,
            progress=show_progress,
        )
    finally:
        show_progress("")
    print(rehearsal.to_text())
    tell_replicas(planned, "rehearsed")
    if arguments.output is not None:
        files.write(arguments.output, rehearsal.measured.to_json())
        print(f"\nWrote {arguments.output}; see it by `rota show {arguments.output}`.")
    return 0
