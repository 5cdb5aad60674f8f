"""A rank without torch: python -m support.bare_rank FILE runs the file with `report`, `rank`, `count` and `line`."""

import json
import os
import socket
import sys
from pathlib import Path

line = socket.socket(fileno=int(os.environ["ROTA_CONTROL"].split()[0]))


def report(event: str, words: str = "", step: int = 0, training: object = "") -> None:
    line.send(json.dumps({"event": event, "words": words, "step": step, "training": str(training)}).encode())


def count() -> int:
    """How many ranks have asked before, of all starts in this folder."""
    with Path("count").open("a") as file:
        file.write(".")
        return file.tell() - 1


if __name__ == "__main__":
    names = {"report": report, "count": count, "rank": int(os.environ["RANK"]), "line": line}
    exec(compile(Path(sys.argv[1]).read_text(), sys.argv[1], "exec"), names)
