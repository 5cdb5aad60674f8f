"""Processes of one training are killed in every phase of a step, in every role, at once, and during the recovery."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks" / "reliability"))

from deaths import AT_ONCE, PHASES, spread
from trainings import compare, done_in, last_words, leftovers, plan_of, prepare, rota_run

pytestmark = [pytest.mark.dist, pytest.mark.faults]


def exit_code(folder: Path, dp: int = 1, options_of_run: Sequence[str] = (), inside: Sequence[str] = ()) -> int:
    """Of `rota run`, of which nothing is left, even if the test is out of time."""
    with rota_run(folder, dp, None, options_of_run, inside) as command:
        try:
            return command.wait()
        finally:
            command.kill()


def undisturbed(folder: Path, num_steps: int, dp: int = 1, num_ranks: int = 4) -> None:
    prepare(folder, plan_of(num_ranks), num_steps=num_steps, dp=dp, save_every=None)
    assert exit_code(folder, dp) == 0, last_words(folder)


def die(
    folder: Path,
    deaths: list[tuple[int, int, str]],
    dp: int = 1,
    num_ranks: int = 4,
    options_of_run: Sequence[str] = (),
    inside: Sequence[str] = (),
) -> int:
    """How many steps were done again. All else is as if nothing had been."""
    disturbed, quiet = folder / "disturbed", folder / "undisturbed"
    num_steps = max(step for step, *_ in deaths) + 3
    options = {"num_steps": num_steps, "dp": dp, "save_every": 4, "evaluate_every": 4}
    prepare(disturbed, plan_of(num_ranks), deaths, **options)
    assert exit_code(disturbed, dp, options_of_run, inside) == 0, last_words(disturbed)
    assert [number for number in range(len(deaths)) if not (disturbed / f"dead-{number}").exists()] == []
    assert leftovers(disturbed) == []
    undisturbed(quiet, num_steps, dp, num_ranks)
    return compare(done_in(disturbed), done_in(quiet))


def test_every_phase_and_role(tmp_path: Path) -> None:
    """And two at once, and while the others recover. The benchmark has every role in every phase."""
    phases = [phase for phase in PHASES if phase != "reduce"]
    deaths = spread([*zip([0, 1, 3] * len(phases), phases, strict=False), *AT_ONCE])
    assert die(tmp_path, deaths) <= len(deaths)


def test_while_replicas_reduce(tmp_path: Path) -> None:
    assert die(tmp_path, spread([(0, "reduce"), (3, "reduce")]), dp=2, num_ranks=2) <= 2


def test_the_supervisor(tmp_path: Path) -> None:
    """The next command goes on from the last checkpoint."""
    disturbed, quiet = tmp_path / "disturbed", tmp_path / "undisturbed"
    prepare(disturbed, plan_of(4), [(6, 1, "with supervisor")], num_steps=10, save_every=4)
    assert exit_code(disturbed) == -9
    assert leftovers(disturbed) == []
    assert exit_code(disturbed) == 0, last_words(disturbed)
    undisturbed(quiet, 10)
    num_again = compare(done_in(disturbed), done_in(quiet))
    assert 1 <= num_again <= 2  # step 4, and 5 unless process 0 was killed before it wrote that it was done
    assert leftovers(disturbed) == []


@pytest.fixture
def own_machine() -> list[str]:
    """Runs a command that sees a network of its own, and as its folder `run` a disk of 64 kB."""
    script = 'ip link set lo up && mkdir -p run && mount -t tmpfs -o size=64k none run && exec "$@"'
    command = ["unshare", "--net", "--mount", "sh", "-c", script, "sh"]
    if subprocess.run([*command, "true"], cwd=tempfile.mkdtemp(), check=False, capture_output=True).returncode:
        pytest.skip("no rights to make namespaces (run as root, with iproute2)")
    return command


def test_a_rank_that_is_stopped_and_a_network_that_drops(tmp_path: Path, own_machine: list[str]) -> None:
    """And a disk that is full: no step is lost, but no checkpoint is whole. A second without network is not noticed."""
    deaths = [(1, 2, "drop 1"), (5, 1, "stop"), (9, 2, "drop")]
    assert die(tmp_path, deaths, options_of_run=("--timeout", "20"), inside=own_machine) <= 2 + 3
    told = (tmp_path / "disturbed" / "stderr").read_text()
    assert told.count("rota run: the run hung (") >= 2
    assert "No space left on device" in told
    assert "training resumes from step 4 in memory" in told
    assert told.count("training resumes from step") == told.count(": restart ")
