"""The tests on accelerators, tried on the CPU: the result has what they have seen."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from support import ROOT

pytestmark = pytest.mark.dist

CHOSEN = "test_every_family and 2-float64 or test_wrapped_stages and fsdp-1f1b and 1-2 or test_a_wait_would_be_noticed"


def run_gpu_tests(*options: str, **environment: str) -> str:
    """What they print."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "tests/gpu", *options]
    inherited = {name: value for name, value in os.environ.items() if name != "ROTA_GPU_TESTS"}
    done = subprocess.run(command, cwd=ROOT, env=inherited | environment, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.sweep
def test_the_result_has_what_the_tests_have_seen(tmp_path: Path) -> None:
    file = tmp_path / "result.xml"
    run_gpu_tests("-k", CHOSEN, "--junitxml", str(file), "-o", "junit_family=xunit1", ROTA_GPU_TESTS="cpu")
    (suite,) = ElementTree.parse(file).getroot()
    assert properties_of(suite)["device_type"] == "cpu"
    tests = {test.get("name"): test for test in suite.iter("testcase")}
    family = tests["test_every_family[2-float64]"]
    assert float(family.get("time", 0)) > 0
    assert max(ast.literal_eval(properties_of(family)["worst_difference"]).values()) <= 1e-10
    assert "worst_difference" in properties_of(tests["test_wrapped_stages[1-2-fsdp-1f1b]"])
    skipped = tests["test_a_wait_would_be_noticed"].find("skipped")
    assert skipped is not None
    assert skipped.get("message") == "is for CUDA, and the device here is cpu"


def properties_of(element: ElementTree.Element) -> dict[str, str]:
    return {each.get("name", ""): each.get("value", "") for each in element.iterfind("properties/property")}
