"""Rota reads no pickle: not from a file, a socket, or another process."""

import ast
from pathlib import Path

import rota

PACKAGE = Path(rota.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
#: Of modules, and of functions that unpickle what another process sends. `spawn` reads a pickle from a temporary file.
READ_PICKLES = {"pickle", "marshal", "shelve", "spawn", "torch.multiprocessing.spawn", "multiprocessing.managers"}
READ_PICKLES |= {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"}
READ_PICKLES |= {"send_object_list", "recv_object_list", "cloudpickle"}


def names_in(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name):
            found.add(node.id)
    return found


def pickles_in(path: Path) -> list[str]:
    """What reads pickles there."""
    text = path.read_text()
    if not any(name in text for name in (*READ_PICKLES, ".recv()", "torch.load(")):
        return []
    tree = ast.parse(text)
    found = ["torch.load"] if "torch.load(" in text else []
    found += sorted(names_in(tree) & READ_PICKLES)
    # A pipe's or queue's own `recv` and `send` are pickles; those of `torch.distributed` and of sockets take arguments.
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    bare = [call for call in calls if call.func.attr == "recv" and not call.args]  # type: ignore[attr-defined]
    return [f"{path.relative_to(PACKAGE)}: {name}" for name in found + [f"recv() in line {c.lineno}" for c in bare]]


def test_no_pickle_is_read() -> None:
    assert [told for path in FILES for told in pickles_in(path)] == []
