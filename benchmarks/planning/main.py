"""How long autoplan takes for 32 layers, 64 ranks and a batch of 512 rows.

python benchmarks/planning/main.py
"""

from __future__ import annotations

import time

from workloads import FAST, GB, NODES, Layer, block, costs, embedding, head

from rota import Machine, autoplan

H, S = 4096, 2048


def main() -> None:
    layers: list[Layer] = [embedding(H, S, 50_000), *[block(H, S)] * 30, head(H, S, 50_000)]
    profiles = {rows: costs(layers, rows) for rows in (1, 2, 4)}
    for memory in (80, 24, 12):
        began = time.perf_counter()
        answer = autoplan(profiles, Machine(64, memory * GB, FAST, 8, NODES), 512, time_limit_s=60)
        print(f"{memory} GB per rank: {time.perf_counter() - began:.1f} s")
        print(answer.to_text(), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
