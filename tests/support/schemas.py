"""The JSON schemas of the files that others may write: PYTHONPATH=tests python -m support.schemas writes them."""

import json
from typing import Any

import msgspec

from rota.core.cluster import ClusterFile
from rota.core.costs import Costs
from rota.core.plan import PlanFile
from rota.core.timeline import TimelineFile
from support import ROOT

FOLDER = ROOT / "docs" / "schemas"
FILES = {"plan": PlanFile, "costs": Costs, "cluster": ClusterFile, "timeline": TimelineFile}


def schema(name: str) -> dict[str, Any]:
    """The schema of a kind of file, which is told by its field "rota"."""
    top, parts = msgspec.json.schema_components([FILES[name]], ref_template="#/$defs/{name}")
    own = parts.pop(top[0]["$ref"].removeprefix("#/$defs/"))
    own["properties"] = {"rota": {"const": name}, **own["properties"]}
    own["required"] = ["rota", *own["required"]]
    own["additionalProperties"] = False
    for field in own["properties"].values():
        if field.get("type") == "array" and isinstance(field.get("default"), int):  # one number stands for all stages
            field |= {"type": ["array", "integer"], "minimum": 0}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **own, "$defs": parts}


def text(name: str) -> str:
    return json.dumps(schema(name), indent=1) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in FILES:
        (FOLDER / f"{name}.json").write_text(text(name))
