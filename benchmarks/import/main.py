"""`import rota` in a fresh process, and beside it the same process without it."""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median

ROUNDS = 15


def milliseconds(code: str) -> float:
    start_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return (time.perf_counter() - start_s) * 1000


def main() -> None:
    pairs = [(milliseconds("pass"), milliseconds("import rota")) for _ in range(ROUNDS)]  # alternating
    bare, importing = (median(column) for column in zip(*pairs, strict=True))
    print(f"process alone {bare:.1f} ms, with `import rota` {importing:.1f} ms: import {importing - bare:.1f} ms")


if __name__ == "__main__":
    main()
