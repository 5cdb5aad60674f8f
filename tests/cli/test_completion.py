"""`rota completion`: shells complete what there is."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from rota.cli.commands import COMMANDS
from rota.cli.commands.completion import script

ASK = """
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _rota; echo "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("rota sim", "simulate"),
        ("rota import", "import-trace import"),
        ("rota plan zb_", "zb_h1 zb_h2 zb_auto zb_v"),
        ("rota explain --pl", "--planned"),
        ("rota plan search --shape wa", "wave"),
        ("rota plan search --objective ''", "makespan span period"),
        ("rota run --engine t", "torch"),
        ("rota calibrate m.json --plan zb_h", "zb_h1 zb_h2"),
        ("rota export ''", "torchtitan megatron deepspeed --help"),
        ("rota export megatron plan.json --ty", "--type"),
        ("rota checkpoint v", "verify"),
        ("rota completion ''", "bash zsh fish --help"),
        ("rota explain timeline", ""),  # a file name: the shell's own completion
    ],
)
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(words: str, found: str) -> None:
    asked = script("bash", COMMANDS) + ASK.format(words=words)
    told = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    assert (told.stdout.strip(), told.stderr) == (found, "")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_of_other_shells_have_every_command(shell: str) -> None:
    text = script(shell, COMMANDS)
    assert all(command.name in text for command in COMMANDS)
    if (path := shutil.which(shell)) is not None:
        subprocess.run([path, "-n", "/dev/stdin"], input=text, text=True, check=True)
