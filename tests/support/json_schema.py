"""Checks values against the part of JSON Schema that our schemas use, and refuses schemas that use more."""

from collections.abc import Iterator, Mapping
from typing import Any

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}
_KNOWN = {"$schema", "title", "description", "type", "const", "enum", "items"}
_KNOWN |= {"properties", "required", "additionalProperties"}


def violations(value: Any, schema: Any, path: str = "$") -> Iterator[str]:
    """What in `value` the schema does not allow."""
    assert schema.keys() <= _KNOWN, f"{path}: {schema.keys() - _KNOWN} is not checked"
    if "const" in schema and value != schema["const"]:
        yield f"{path} is {value!r}, not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path} is {value!r}, not one of {schema['enum']}"
    names = schema.get("type", [*_TYPES])
    if not any(_is_a(value, name) for name in ([names] if isinstance(names, str) else names)):
        yield f"{path} is {value!r}, not {names}"
    elif isinstance(value, dict):
        yield from _of_object(value, schema, path)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from violations(item, schema.get("items", {}), f"{path}[{i}]")


def _is_a(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _TYPES[name])


def _of_object(value: dict[str, Any], schema: Any, path: str) -> Iterator[str]:
    known = schema.get("properties", {})
    yield from (f"{path} has no {name!r}" for name in schema.get("required", ()) if name not in value)
    for name, item in value.items():
        others = schema.get("additionalProperties", {})
        if name in known:
            yield from violations(item, known[name], f"{path}.{name}")
        elif others is False:
            yield f"{path} has {name!r}, which the schema does not know"
        else:
            yield from violations(item, others, f"{path}.{name}")
