"""The command line, `rota …`: one file per command in `commands/`, and what they share beside it."""

from rota.cli.main import main

__all__ = ["main"]
