"""Environment variables: which are read, from where, and which hurt."""

from __future__ import annotations

from pathlib import Path

import pytest

from rota.diagnosis import variables


@pytest.mark.parametrize(
    ("name", "value", "hurts"),
    [
        ("NCCL_P2P_DISABLE", "1", True),
        ("NCCL_P2P_DISABLE", "0", False),
        ("NCCL_DEBUG", "info", True),
        ("NCCL_DEBUG", "WARN", False),
        ("TORCH_NCCL_BLOCKING_WAIT", "true", True),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", True),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", False),
        ("CUDA_LAUNCH_BLOCKING", "1", True),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", True),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "8", False),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", True),
        ("NCCL_NEW_IN_SOME_VERSION", "7", False),
    ],
)
def test_what_hurts_on_accelerators(name: str, value: str, hurts: bool) -> None:
    (found,) = variables.judge({name: value}, on_accelerators=True).findings
    assert found.level == ("warning" if hurts else "ok")
    assert found.text.startswith(f"{name}={value}")
    assert bool(found.remedy) == hurts


def test_without_accelerators_those_of_nccl_change_nothing() -> None:
    given = {"CUDA_LAUNCH_BLOCKING": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    levels = {each.about: each.level for each in variables.judge(given, on_accelerators=False).findings}
    assert levels == {"CUDA_LAUNCH_BLOCKING": "ok", "TORCH_DISTRIBUTED_DEBUG": "warning"}


def test_only_these_libraries_variables_are_read_also_from_nccls_files(tmp_path: Path) -> None:
    file = tmp_path / "nccl.conf"
    file.write_text("# a comment\nNCCL_DEBUG = INFO\nNCCL_P2P_DISABLE=1\nPATH=/x\n")
    given = {"NCCL_CONF_FILE": str(file), "NCCL_DEBUG": "WARN", "SECRET": "x", "CUDA_VISIBLE_DEVICES": "0,1"}
    found = variables.set_variables(given)
    assert "SECRET" not in found
    assert "PATH" not in found
    assert found["NCCL_DEBUG"] == "WARN"  # the environment hides the file
    assert found["NCCL_P2P_DISABLE"] == "1"
    assert found["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_none_is_told() -> None:
    (found,) = variables.judge({}, on_accelerators=True).findings
    assert found.level == "ok"
    assert "none of their variables is set" in found.text
