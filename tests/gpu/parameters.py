"""What tests on accelerators are called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Ranks = Callable[..., Any]
Record = Callable[[str, object], None]

ONE_OR_TWO = [pytest.param(number, marks=pytest.mark.gpu(number)) for number in (1, 2)]
UP_TO_FOUR = [*ONE_OR_TWO, pytest.param(4, marks=pytest.mark.gpu(4))]
