"""The command line: `rota …`. Every arrow between its commands is a readable file."""

from rota.cli.interrupts import told_at_once

with told_at_once():
    from rota.cli.main import main

__all__ = ["main"]
