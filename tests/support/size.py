"""How many lines of Python there are, room by room: `PYTHONPATH=tests python -m support.size`."""

from collections import Counter
from pathlib import Path

from support import ROOT

MOST_LINES = {"src": 61_800, "tests": 45_500}


def lines_by_room(folder: Path) -> Counter[str]:
    """Count the lines of each room, which is a folder right below `folder`; "." is what lies in none."""
    rooms: Counter[str] = Counter()
    for path in (*folder.rglob("*.py"), *folder.rglob("*.pyi")):
        inside = path.relative_to(folder)
        rooms[inside.parts[0] if len(inside.parts) > 1 else "."] += path.read_bytes().count(b"\n")
    return rooms


def main() -> None:
    for name, folder in (("src", ROOT / "src" / "rota"), ("tests", ROOT / "tests")):
        rooms = lines_by_room(folder)
        print(f"{name}: {rooms.total():,} lines, of at most {MOST_LINES[name]:,}")
        print("  " + ", ".join(f"{room} {lines:,}" for room, lines in rooms.most_common()))


if __name__ == "__main__":
    main()
