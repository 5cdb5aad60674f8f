"""How long autoplan takes for 32 layers, 64 ranks and a batch of 512 rows.

python benchmarks/planning/main.py [GB …]      with so much memory per rank, by default 80, 24 and 12 GB
"""

from __future__ import annotations

import argparse
import time

from workloads import FAST, GB, NODES, Layer, block, costs, embedding, head

from rota import Machine, autoplan

H, S = 4096, 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("memory", nargs="*", type=int, default=[80, 24, 12], metavar="GB")
    given = parser.parse_args()
    layers: list[Layer] = [embedding(H, S, 50_000), *[block(H, S)] * 30, head(H, S, 50_000)]
    profiles = {rows: costs(layers, rows) for rows in (1, 2, 4)}
    for memory in given.memory:
        began = time.perf_counter()
        answer = autoplan(profiles, Machine(64, memory * GB, FAST, 8, NODES), 512, time_limit_s=60)
        print(f"{memory} GB per rank: {time.perf_counter() - began:.1f} s")
        print(answer.to_text(), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
