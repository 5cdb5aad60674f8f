import pytest


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here looks at how long anything takes."""
    monkeypatch.setattr("rota.profiling.layer_measurement._RUN_NS", 0)
    monkeypatch.setattr("rota.profiling.stage_profile._RUN_NS", 0)
