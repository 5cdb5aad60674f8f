"""The host as it is, and what would be wrong with others."""

from __future__ import annotations

import os
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rota.diagnosis import host
from rota.diagnosis.host import Host
from rota.diagnosis.report import Finding

GB = 10**9
GOOD = Host(
    system="linux",
    kernel="6.8",
    num_cores=64,
    quota_cores=None,
    memory_bytes=512 * GB,
    available_bytes=500 * GB,
    shm_bytes=256 * GB,
    shm_free_bytes=256 * GB,
    max_files=1024 * 1024,
    max_files_allowed=1024 * 1024,
    temporary_folder="/tmp",
    temporary_free_bytes=100 * GB,
    loopback_error="",
    pidfd_error="",
)


def test_this_host_is_as_the_system_says() -> None:
    found = host.look()
    assert found.num_cores == len(os.sched_getaffinity(0))
    assert found.max_files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert found.memory_bytes is not None
    assert 0 < found.memory_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert found.loopback_error == found.pidfd_error == ""


def test_a_good_host_has_nothing_wrong() -> None:
    assert {finding.level for finding in host.judge(GOOD, 8, on_accelerators=True).findings} == {"ok"}


@pytest.mark.parametrize(
    ("changes", "level", "about", "told"),
    [
        ({"num_cores": 4}, "warning", "cores", "4 cores, for 8 ranks"),
        ({"quota_cores": 2.5}, "warning", "cores", "of which the control group may use 2.5"),
        ({"available_bytes": 3 * GB}, "warning", "memory", "3 GB of 512 GB available, for 8 ranks"),
        ({"available_bytes": None}, "skipped", "memory", "cannot be read"),
        ({"shm_bytes": 64 * 10**6, "shm_free_bytes": 64 * 10**6}, "warning", "/dev/shm", "64 MB of 64 MB free"),
        ({"shm_bytes": None}, "warning", "/dev/shm", "there is none"),
        ({"max_files": 256, "max_files_allowed": 4096}, "warning", "limits", "256 files and sockets per process"),
        ({"temporary_free_bytes": 10**6}, "problem", "temporary folder", "/tmp has almost no room"),
        ({"temporary_free_bytes": None}, "problem", "temporary folder", "/tmp cannot be written to"),
        ({"loopback_error": "there is no loopback interface, lo"}, "problem", "loopback", "no loopback"),
        ({"pidfd_error": "pidfd_open does not work here"}, "problem", "processes", "pidfd_open"),
        ({"system": "darwin"}, "problem", "system", "darwin 6.8"),
    ],
)
def test_what_is_wrong_is_told_with_a_remedy(changes: dict[str, Any], level: str, about: str, told: str) -> None:
    findings = host.judge(replace(GOOD, **changes), 8, on_accelerators=True).findings
    (found,) = (finding for finding in findings if finding.level != "ok")
    assert (found.level, found.about) == (level, about)
    assert told in found.text
    assert bool(found.remedy) == (level != "skipped")


def test_any_number_of_files_is_enough() -> None:
    unlimited = replace(GOOD, max_files=-1, max_files_allowed=-1)
    assert (
        Finding("host", "ok", "limits", "any number of files and sockets per process")
        in host.judge(unlimited, 8, on_accelerators=False).findings
    )


def test_limits_of_the_control_group_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text("1000000000\n")
    (tmp_path / "memory.current").write_text("400000000\n")
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    found = host.look()
    assert found.quota_cores == 1.5
    assert (found.memory_bytes, found.available_bytes) == (10**9, 6 * 10**8)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    found = host.look()
    assert found.quota_cores is None
    assert found.memory_bytes is not None
    assert found.memory_bytes > 10**9
