"""The command line: `rota …`. Every arrow between its commands is a readable file."""

from rota.cli.main import main

__all__ = ["main"]
