"""TracedStage: one stage of a traced model, its own modules and the code that calls them as the model did."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any, final

from torch import fx, nn


@final
class TracedStage(nn.Module):
    """A stretch of a model's forward as straight-line code over modules that keep their names in the model.

    Unlike an `fx.GraphModule` it survives pickling as it is: neither traced again nor its buffers registered anew.
    """

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__()
        code = graph.python_code(root_module="self")
        self._code = code.src
        self._imports = {name: value.__name__ for name, value in code.globals.items() if isinstance(value, ModuleType)}
        self._globals = {name: value for name, value in code.globals.items() if name not in self._imports}
        self._compile()

    def _compile(self) -> None:
        namespace = self._globals | {name: import_module(path) for name, path in self._imports.items()}
        exec(compile(self._code, f"<stage code at {id(self):#x}>", "exec"), namespace)
        self._run = namespace["forward"]

    def forward(self, *values: Any) -> Any:
        """The stage's output, given the values of its incoming edges and its inputs."""
        return self._run(self, *values)

    def extra_repr(self) -> str:
        """The code, which is all there is to a stage beside its modules."""
        return self._code.strip()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_run"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._compile()
