"""A profile on disk: read if it is of the same model, device and versions, else refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import final

from rota import reading
from rota.errors import FormatError, PipelineError, RotaError
from rota.layers import LayerCosts
from rota.profiles import Profile


@final
class Cache:
    """What is known of a model, and its file, if it has one; every addition is written at once."""

    def __init__(self, identity: Mapping[str, str], path: Path | None, known: Profile | None) -> None:
        self.path, self._identity, self._known = path, identity, known
        self._asked: list[int] = []

    @classmethod
    def of(cls, where: str | Path | None, name: str, identity: Mapping[str, str], refresh: bool) -> Cache:
        """`where` a file, or a folder in which the file is called after `name`. Raises PipelineError, FormatError."""
        if where is None:
            return cls(identity, None, None)
        path = Path(where)
        if path.is_dir() or not path.suffix:
            path = path / f"{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-').lower()}.json"
        if refresh or not path.exists():
            return cls(identity, path, None)
        try:
            known = Profile.from_json(reading.read_text(path))
        except RotaError as error:
            raise FormatError(f"{path}: {error}; remove it, or profile anew by refresh=True (--refresh)") from None
        cache = cls(identity, path, known)
        cache._refuse_stale(identity)
        return cache

    def has(self, rows: int, inputs: Mapping[str, str]) -> bool:
        """Whether the entry for `rows` is there. Raises PipelineError where it is of other inputs."""
        self._asked.append(rows)
        if self._known is None or rows not in self._known:
            return False
        self._refuse_stale(inputs)
        return True

    def _refuse_stale(self, now: Mapping[str, str]) -> None:
        then = dict(self._known.key) if self._known else {}
        differing = [
            f"{name} was {_in_line(then.get(name, 'not told'))}, is {value}"
            for name, value in now.items()
            if then.get(name) != value
        ]
        if differing:
            raise PipelineError(
                f"the profile {self.path} is stale: {'; '.join(differing)}. Profile anew by refresh=True (--refresh), "
                f"or name another file"
            )

    def add(self, layers: LayerCosts, inputs: Mapping[str, str]) -> None:
        """Replaces what was there for these rows."""
        key = {**self._identity, **inputs}
        self._known = self._known.with_layers(layers, key) if self._known else Profile((layers,), tuple(key.items()))
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.write_text(self._known.to_json())
            except OSError as error:
                raise PipelineError(
                    f"cannot write the profile {self.path}: {error.strerror}; give another cache"
                ) from None

    @property
    def profile(self) -> Profile:
        """Of the numbers of rows that were asked for."""
        assert self._known is not None
        return Profile(tuple(self._known[rows] for rows in self._asked), self._known.key)


def _in_line(value: str) -> str:
    """As it is where it can be shown."""
    return value if value.isprintable() and len(value) <= reading.LONGEST_NAME else reading.short(value)
