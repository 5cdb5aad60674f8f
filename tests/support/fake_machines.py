"""Machines that are not here: what PyTorch, nvidia-smi and ranks would say on them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rota.diagnosis import accelerators, nvidia_smi, sessions
from rota.diagnosis.measuring import pairs_of
from rota.diagnosis.rank import Step
from rota.diagnosis.sessions import Outcome

GB = 10**9
_look = nvidia_smi.look


@dataclass
class FakeCuda:
    """`number` devices of one kind; fields say what is unusual."""

    number: int = 8
    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    total_bytes: int = 85 * GB
    free_bytes: dict[int, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    broken: dict[int, str] = field(default_factory=dict)
    without_peers: frozenset[tuple[int, int]] = frozenset()
    architectures: tuple[str, ...] = ("sm_80", "sm_90", "sm_120", "compute_120")
    # --- what nvidia-smi says
    way: str = "NV18"
    ways: dict[tuple[int, int], str] = field(default_factory=dict)
    pcie: tuple[int, int, int] = (5, 16, 16)
    compute_mode: str = "Default"
    mig: str = "Disabled"
    order: Sequence[int] | None = None  # nvidia-smi's index of each of PyTorch's

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let PyTorch and nvidia-smi answer for these devices."""
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: self.number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: self.number)
        monkeypatch.setattr(torch.cuda, "get_device_properties", self._properties)
        monkeypatch.setattr(torch.cuda, "mem_get_info", self._memory)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) not in self.without_peers)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: [*self.architectures])
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
        monkeypatch.setattr(accelerators, "look_apart", accelerators.look)
        monkeypatch.setattr(nvidia_smi.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
        monkeypatch.setattr(nvidia_smi, "look", lambda: _look(self.run))

    def run(self, command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run` of nvidia-smi."""
        out = self.matrix() if "topo" in command else self.query()
        return subprocess.CompletedProcess(command, 0, out, "")

    def query(self) -> str:
        """What `--query-gpu` prints."""
        lines = []
        for index in range(self.number):
            device = self._device_at(index)
            fields = [index, f"GPU-{_uuid(device)}", self._name(device), "570.86.15", 81559, 4, self.compute_mode]
            lines.append(", ".join(map(str, [*fields, self.mig, *self.pcie])))
        return "\n".join(lines) + "\n"

    def matrix(self) -> str:
        """What `topo -m` prints."""
        names = [f"GPU{index}" for index in range(self.number)]
        lines = ["\t" + "\t".join(f"\x1b[4m{name}\x1b[0m" for name in [*names, "NIC0", "CPU Affinity"])]
        for a in range(self.number):
            ways = [" X " if a == b else self.ways.get((min(a, b), max(a, b)), self.way) for b in range(self.number)]
            lines.append("\t".join([f"GPU{a}", *ways, "PIX", "0-55"]))
        lines += ["NIC0" + "\tPIX" * self.number + "\t X ", "", "Legend:", "", "  X    = Self"]
        return "\n".join(lines) + "\n"

    def _device_at(self, index: int) -> int:
        return index if self.order is None else [*self.order].index(index)

    def _name(self, device: int) -> str:
        return self.names.get(device, self.name)

    def _properties(self, device: int) -> Any:
        if device in self.broken:
            raise RuntimeError(self.broken[device])
        major, minor = self.capability
        return SimpleNamespace(name=self._name(device), major=major, minor=minor, uuid=_uuid(device))

    def _memory(self, device: int) -> tuple[int, int]:
        return self.free_bytes.get(device, self.total_bytes - GB // 2), self.total_bytes


def _uuid(device: int) -> str:
    return f"00000000-0000-0000-0000-{device:012d}"


@dataclass
class FakeRanks:
    """What ranks measure, instead of `sessions.run_steps`: rates in GB/s by pair, and what fails by step."""

    rate: float = 370.0
    rates: dict[tuple[int, int], float] = field(default_factory=dict)
    latency_us: float = 14.0
    changed: frozenset[tuple[int, int]] = frozenset()
    failing: dict[str, str] = field(default_factory=dict)  # by `do`, or by a case's family
    late: frozenset[str] = frozenset()  # steps for which no time was left
    differences: dict[str, float] = field(default_factory=dict)  # by family
    shared: bool = True
    offset_ns: int = 3_000
    spread_ns: int = 9_000
    torches: tuple[str, ...] = ("2.13.0",)
    asked: list[tuple[int, str]] = field(default_factory=list)  # ranks and kind of each call

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Start no processes."""
        monkeypatch.setattr(sessions, "run_steps", self.run_steps)

    def run_steps(
        self, num_ranks: int, kind: str, steps: Sequence[Step], timeout_s: float, deadline_s: float
    ) -> list[Outcome]:
        self.asked.append((num_ranks, kind))
        return [self._outcome(step, num_ranks, kind) for step in steps]

    def _outcome(self, step: Step, num_ranks: int, kind: str) -> Outcome:
        name = step.case["family"] if step.case else step.do
        if name in self.late:
            return Outcome(step, error="no time was left for it")
        if name in self.failing:
            return Outcome(step, error=self.failing[name], was_begun=True)
        results: dict[str, Callable[[], Any]] = {
            "ranks": lambda: [self._rank(rank, kind) for rank in range(num_ranks)],
            "links": lambda: [self._link(pair, step.sizes) for pair in pairs_of(num_ranks)],
            "clocks": lambda: self._clocks(num_ranks),
            "case": lambda: {
                "trains": name != "forward_only",
                "difference": self.differences.get(name, 3e-16),
                "step_ns": 2_100_000,
                "open_files": 40,
            },
        }
        return Outcome(step, results[step.do](), was_begun=True)

    def _rank(self, rank: int, kind: str) -> dict[str, Any]:
        device = kind if kind == "cpu" else f"{kind}:{rank}"
        torch_version = self.torches[rank % len(self.torches)]
        return {"host": "node1", "device": device, "name": "", "python": "3.12.4", "torch": torch_version}

    def _link(self, pair: tuple[int, int], sizes: Sequence[int]) -> dict[str, Any]:
        rate = self.rates.get(pair, self.rate)  # GB/s are bytes per ns
        times = [round(1000 * self.latency_us + size / rate) for size in sizes]
        return {
            "ranks": [*pair],
            "backend": "nccl",
            "message_bytes": [*sizes],
            "one_way_ns": times,
            "intact": pair not in self.changed,
        }

    def _clocks(self, num_ranks: int) -> dict[str, Any]:
        offsets = [0, *[self.offset_ns] * (num_ranks - 1)]
        return {"shared": self.shared, "offsets_ns": offsets, "spread_ns": [0, *[self.spread_ns] * (num_ranks - 1)]}
