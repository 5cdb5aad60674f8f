"""Arrows go one way: who may import what, inside rooms too, and that `import rota` stays light."""

import subprocess
import sys
from graphlib import TopologicalSorter

from support.layers import HEAVY, MODULES, PAGE, ROOMS, complaints, contracted, imports_of, page


def test_every_module_imports_only_what_its_row_allows() -> None:
    assert [line for module in MODULES for line in complaints(module)] == []


def test_nothing_inside_a_room_imports_in_a_circle() -> None:
    """Neither its modules nor its sub-rooms, each taken as a whole."""
    for room in ROOMS:
        by_module = {
            module: {name for name, _ in imports_of(path) if name in MODULES and name != module}
            for module, path in MODULES.items()
            if module.startswith(f"rota.{room}")
        }
        for graph in (by_module, contracted(room)):
            TopologicalSorter(graph).prepare()  # raises CycleError


def test_contributing_shows_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run PYTHONPATH=tests python -m support.layers"


def test_rota_and_its_core_load_nothing_heavy() -> None:
    use = (
        "dir(rota); rota.schedules.NAMED; rota.explain, rota.compare, rota.calibrate, rota.Timeline, rota.DeviceOrder; "
        "rota.check(rota.schedules.gpipe(rota.place(rota.Costs.uniform(2), rota.Cluster.uniform(2)), 2)); "
        "found = {name for name in HEAVY if name in sys.modules}; "
        "import rota.interop, rota.compat.deepspeed.schedule; rota.interop.import_traces; rota.autoplan, rota.Machine; "
        "found |= {'torch', 'numpy', 'ortools'} & {*sys.modules}"
    )
    code = f"import sys, rota; HEAVY = {HEAVY}; {use}; print(*found)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200)
    assert done.stdout.strip() == ""
