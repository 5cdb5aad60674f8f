"""Unmodified models in stages: what splitting and a stage's forward cost, and a step against hand-written stages.

python benchmarks/splitting/main.py [--only overhead|step] [--steps 60]
"""

from __future__ import annotations

import argparse

from overhead import print_table
from step_time import print_comparison


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("overhead", "step"))
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    if given.only != "step":
        print_table()
    if given.only != "overhead":
        print_comparison(given.steps)


if __name__ == "__main__":
    main()
