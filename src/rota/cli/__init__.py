"""The command line, `rota …`: one file per command in `commands/`, and what they share beside it."""

from rota.cli.requirements import exit_on_ctrl_c

with exit_on_ctrl_c():
    from rota.cli.main import main

__all__ = ["main"]
