"""Which node of a run this is, what all nodes must have in common, and how their ranks find each other."""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from rota.errors import PipelineError, UsageError
from rota.plan import Plan
from rota.runtime.environment import node_environments
from rota.runtime.launcher_files import digest

JOIN_S = 600.0  # for all nodes to join
MOST_NODES = 256
_SIOCGIFADDR = 0x8915  # linux/sockios.h


class Nodes(NamedTuple):
    """This machine is node `node` of `num_nodes`; node 0 leads, and listens at `host` and `port`.

    `secret`: what all of them share, see `shared_secret`.
    """

    num_nodes: int
    node: int
    host: str
    port: int
    secret: bytes

    def num_here(self, num_processes: int) -> int:
        """How many of the processes are on each node. Raises UsageError if they do not divide."""
        if num_processes % self.num_nodes:
            raise UsageError(
                f"{num_processes} processes cannot be divided among {self.num_nodes} nodes; give a plan or --mesh for "
                f"a multiple of {self.num_nodes}"
            )
        return num_processes // self.num_nodes

    def numbers(self, node: int, num_processes: int) -> range:
        """The numbers of a node's processes: neighbours in the pipeline are on one node where possible."""
        here = self.num_here(num_processes)
        return range(node * here, (node + 1) * here)

    def node_of(self, number: int, num_processes: int) -> int:
        """Which node a process is on."""
        return number // self.num_here(num_processes)

    def environments(
        self, store: str, num_ranks: int, here: Mapping[int, int], own_address: str
    ) -> list[dict[str, str]]:
        """The variables of this node's ranks, see `node_environments`.

        `own_address`: by which the other nodes reach this one.
        """
        name = "GLOO_SOCKET_IFNAME"
        interface = os.environ.get(name) or interface_of(own_address)
        return node_environments(store, num_ranks, here, self.node, (self.host, self.port), interface)


class NodeLost(PipelineError):
    """A node does not answer any more."""

    def __init__(self, node: int, words: str) -> None:
        super().__init__(words)
        self.node = node


def job_of(plan: Plan, script: bytes, arguments: Sequence[str], options: Sequence[object]) -> dict[str, str]:
    """What must be the same on all nodes: its name for people, and a short text that tells it from others."""
    return {
        "Rota": _version("rota"),
        "PyTorch": _version("torch"),
        "Python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "plan": digest(plan),
        "script": hashlib.sha256(script).hexdigest(),
        "arguments of the script": hashlib.sha256(repr([*arguments]).encode()).hexdigest(),
        "options of rota run": hashlib.sha256(repr([*options]).encode()).hexdigest(),
    }


def difference(theirs: dict[str, str], ours: dict[str, str]) -> str | None:
    """The first difference between the jobs of two nodes, for people; None if they are the same."""
    for name in ours:
        if theirs.get(name) != ours[name]:
            if name in ("Rota", "PyTorch", "Python"):
                return f"it has {name} {theirs.get(name)}, node 0 has {ours[name]}; install the same on all nodes"
            return (
                f"its {name} differ{'s' if name in ('plan', 'script') else ''} from node 0's; give all nodes the same"
            )
    return None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def interface_of(address: str) -> str:
    """The network interface of this machine with an address. Raises PipelineError if there is none."""
    wanted = ipaddress.ip_address(address.split("%")[0])
    if isinstance(wanted, ipaddress.IPv6Address) and wanted.ipv4_mapped is not None:
        wanted = wanted.ipv4_mapped
    for interface, its_address in _addresses():
        if its_address == wanted:
            return interface
    raise PipelineError(
        f"no network interface has the address {address}, by which the other nodes reach this one; name one in "
        f"GLOO_SOCKET_IFNAME"
    )


def _addresses() -> list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    found: list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                row = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has no IPv4 address
            found.append((name, ipaddress.IPv4Address(row[20:24])))
    of_ipv6 = Path("/proc/net/if_inet6")
    if of_ipv6.exists():
        rows = [line.split() for line in of_ipv6.read_text().splitlines()]
        found += [(row[5], ipaddress.IPv6Address(bytes.fromhex(row[0]))) for row in rows]
    return found
