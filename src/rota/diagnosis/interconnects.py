"""What the interconnect of two devices is rated for: generations of NVLink and PCIe. All others are unknown.

Rates are those of one direction, in bytes per second. NVIDIA's data sheets add up both directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, final


@final
@dataclass(frozen=True, slots=True)
class Interconnect:
    """How two devices are connected.

    Attributes:
        name: In words; "unknown" with a reason if it is not recognized.
        bytes_per_s: What one direction is rated for; None if that is not known.
        source: Where the rating is from; "" without one.
        is_upper_bound: Whether a part of the way is slower by an amount that is not known.
    """

    name: str
    bytes_per_s: int | None = None
    source: str = ""
    is_upper_bound: bool = False


class _Link(NamedTuple):
    generation: str
    link_bytes_per_s: float  # of one link, in one direction
    source: str


#: NVLink by the compute capability of its devices.
_NVLINKS: Mapping[tuple[int, int], _Link] = {
    (6, 0): _Link("NVLink 1", 20e9, "NVIDIA Tesla P100 white paper: 4 links, 160 GB/s in both directions"),
    (7, 0): _Link("NVLink 2", 25e9, "NVIDIA Tesla V100 white paper: 6 links, 300 GB/s in both directions"),
    (7, 5): _Link("NVLink 2", 25e9, "NVIDIA Turing white paper: 2 links, 100 GB/s in both directions"),
    (8, 0): _Link("NVLink 3", 25e9, "NVIDIA A100 white paper: 12 links, 600 GB/s in both directions"),
    (8, 6): _Link("NVLink 3", 14.0625e9, "NVIDIA GA102 white paper: 4 links, 112.5 GB/s in both directions"),
    (9, 0): _Link("NVLink 4", 25e9, "NVIDIA H100 white paper: 18 links, 900 GB/s in both directions"),
    (10, 0): _Link("NVLink 5", 50e9, "NVIDIA Blackwell architecture brief: 18 links, 1.8 TB/s in both directions"),
}

#: PCIe by its generation: transfers per second of a lane, times the share of them that is data (8b/10b, 128b/130b,
#: and 242 of 256 bytes of a flit), over 8 bits.
_PCIE_LANES: Mapping[int, float] = {
    1: 2.5e9 * 8 / 10 / 8,
    2: 5e9 * 8 / 10 / 8,
    3: 8e9 * 128 / 130 / 8,
    4: 16e9 * 128 / 130 / 8,
    5: 32e9 * 128 / 130 / 8,
    6: 64e9 * 242 / 256 / 8,
}
_PCIE_SOURCE = "PCI Express Base Specification"

#: How `nvidia-smi topo -m` calls ways over PCIe, and whether they cross something else.
_PCIE_WAYS: Mapping[str, tuple[str, bool]] = {
    "PIX": ("through one PCIe switch", False),
    "PXB": ("through several PCIe switches", False),
    "PHB": ("through the CPU's PCIe host bridge", False),
    "NODE": ("through the CPU, between PCIe host bridges", True),
    "SYS": ("through the interconnect of the CPU sockets", True),
}

#: A link is slow if it gives less than this part of its rating. NCCL's point-to-point kernels reach 40 to 80% of it.
SLOW = 0.25


def between(way: str | None, capability: tuple[int, int] | None, pcie: tuple[int, int] | None) -> Interconnect:
    """The interconnect of two devices.

    Args:
        way: As `nvidia-smi topo -m` calls it, such as "NV18" or "PIX"; None if that is not known.
        capability: The devices' compute capability, if both have the same one.
        pcie: (generation, lanes) of the slower one of the two, as it could run; None if not known.
    """
    if way is None:
        return Interconnect("unknown: nvidia-smi did not say how the devices are connected")
    if way.startswith("NV") and way[2:].isdecimal():
        return _nvlink(int(way[2:]), capability)
    if way in _PCIE_WAYS:
        return _pcie(way, pcie)
    return Interconnect(f"unknown: nvidia-smi calls it {way}")


def _nvlink(num_links: int, capability: tuple[int, int] | None) -> Interconnect:
    links = f"{num_links} link{'s' if num_links != 1 else ''}"
    known = None if capability is None else _NVLINKS.get(capability)
    if known is None:
        told = (
            "of different devices" if capability is None else f"of compute capability {capability[0]}.{capability[1]}"
        )
        return Interconnect(f"NVLink, {links}, {told}: its rate is unknown")
    return Interconnect(f"{known.generation}, {links}", round(num_links * known.link_bytes_per_s), known.source)


def _pcie(way: str, pcie: tuple[int, int] | None) -> Interconnect:
    words, is_upper_bound = _PCIE_WAYS[way]
    if pcie is None or pcie[0] not in _PCIE_LANES:
        return Interconnect(f"PCIe of an unknown generation, {words}", is_upper_bound=is_upper_bound)
    generation, lanes = pcie
    rate = round(lanes * _PCIE_LANES[generation])
    return Interconnect(f"PCIe {generation}.0 x{lanes}, {words}", rate, _PCIE_SOURCE, is_upper_bound)
