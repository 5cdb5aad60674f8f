"""The modules of problems/, which are scripts rather than a package."""

import importlib.util
import json
import sys
from types import ModuleType
from typing import Any

from rota.core import reading
from rota.core.placement import Placement
from rota.core.placement_file import PlacementFile, placement_fields
from support import ROOT

FOLDER = ROOT / "problems"
PATHS = sorted(FOLDER.glob("*.json"))


def script(name: str) -> ModuleType:
    """A module of problems/ under a name of its own, so that it hides nothing."""
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(FOLDER / f"{name}.py"):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


certificates = script("certificates")
check = script("check")
Reference: Any = script("reference").Reference


def proven_us(placement: Placement, num_microbatches: int, certificate: dict[str, Any]) -> int | None:
    """The bound that the checker recomputes."""
    file = reading.to_fields(PlacementFile(**placement_fields(placement)))
    fields = json.loads(json.dumps({"num_microbatches": num_microbatches, **file}))
    found: int | None = certificates.proven_us(check.Problem(fields), json.loads(json.dumps(certificate)))
    return found
