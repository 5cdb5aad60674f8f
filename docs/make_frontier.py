"""Writes docs/pictures/frontier.png, what docs/search.md shows: `make docs`."""

from __future__ import annotations

from pathlib import Path

from rota.cli import main

PICTURE = Path(__file__).parent / "pictures" / "frontier.png"
COSTS = "--forward-us 93 --backward-us 91 --weight-us 47 --activation 2GB --link 6us"

if __name__ == "__main__":
    main([*f"plan search --frontier --shape wave --ranks 8 {COSTS} --time-limit 240 --force -o".split(), str(PICTURE)])
