"""No bound is above the best of all orders: 10,000 random small problems and more, resumable.

    PYTHONPATH=tests .venv/bin/python -m search.exact.sweep FILE [first seed, last seed + 1]

Each line of FILE is a seed, how many problems it gave (one random placement, several limits), and how many of them were
searched to the exact optimum. Seeds that are in FILE are skipped, so the sweep can be stopped and started again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from search.exact.test_states import check_against_every_plan


def main() -> None:
    """Checks all seeds that are not in the file yet, and prints the sums."""
    path, first, end = Path(sys.argv[1]), *map(int, sys.argv[2:] or (1_000, 11_000))
    path.touch()
    done = {int(line.split()[0]) for line in path.read_text().splitlines()}
    with path.open("a") as file:
        for seed in range(first, end):
            if seed not in done:
                checked, exact = check_against_every_plan(seed, most=60)
                file.write(f"{seed} {checked} {exact}\n")
                file.flush()
    rows = [[int(number) for number in line.split()] for line in path.read_text().splitlines()]
    problems, exact = sum(row[1] for row in rows), sum(row[2] for row in rows)
    print(f"{len(rows):,} seeds, {problems:,} problems: no bound above the best of all orders; {exact:,} also solved")


if __name__ == "__main__":
    main()
