"""No closed-form bound is above the best of all orders, in some 30,000 random small problems (10 minutes).

PYTHONPATH=tests .venv/bin/python -m search.bounds.sweep [first seed] [last seed + 1]
"""

from __future__ import annotations

import sys

from search.bounds.test_bounds import check_against_every_plan

_SEEDS_PER_LINE = 500


def main() -> None:
    """Check all seeds, and print the sums now and then."""
    first, end = map(int, sys.argv[1:] or (1_000, 9_000))
    problems = met = 0
    for seed in range(first, end):
        checked, equal = check_against_every_plan(seed, most=60)
        problems, met = problems + checked, met + equal
        if (seed + 1 - first) % _SEEDS_PER_LINE == 0 or seed + 1 == end:
            print(
                f"{seed + 1 - first:,} seeds, {problems:,} problems: no bound above the best; {met:,} equal it",
                flush=True,
            )


if __name__ == "__main__":
    main()
