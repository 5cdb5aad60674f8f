"""Which machine of several this is: from --nodes, --node, --head and --secret-file, or from Slurm."""

from __future__ import annotations

import argparse
import os
import re
from typing import TYPE_CHECKING, NamedTuple

from rota.cli.arguments import argument_type, number
from rota.cli.parser import Parser
from rota.cli.requirements import InputError

if TYPE_CHECKING:
    from rota.runtime.launching.nodes import Nodes


class Head(NamedTuple):
    """Where node 0 listens."""

    host: str
    port: int


def parse_head(text: str) -> Head:
    """The host and port of "node0:29400" or "[::1]:29400". Raises ValueError."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([^\[\]:\s]+)):(\d{1,5})", text)
    if match is None or not 0 < int(match[3]) < 65536:
        raise ValueError(f"{text!r} is not HOST:PORT; write, for example, node0:29400")
    return Head(match[1] or match[2], int(match[3]))


def add_nodes(parser: Parser) -> None:
    """Add the options for several machines."""
    help_text = (
        "number of machines; run the same command on each, with its own --node (default: 1; under srun, "
        "the number of nodes of the Slurm job step)"
    )
    parser.add_argument("--nodes", type=number(1), metavar="N", help=help_text)
    help_text = (
        "with --nodes: the number of this machine, counted from 0; node 0 coordinates the run (default: under srun, "
        "as Slurm numbers the nodes; otherwise required)"
    )
    parser.add_argument("--node", type=number(0), metavar="I", help=help_text)
    help_text = (
        "with --nodes: address at which the other nodes reach node 0, which listens there until all have joined, "
        "or during the whole run with --backups (default: under srun, the first node of the Slurm job step; otherwise "
        "required)"
    )
    parser.add_argument("--head", type=argument_type(parse_head), metavar="HOST:PORT", help=help_text)
    help_text = (
        "with --nodes: file that only you can read, with a secret that only your nodes share (default: the "
        "secret in the environment variable ROTA_SECRET)"
    )
    parser.add_argument("--secret-file", metavar="FILE", help=help_text)


def given_nodes(arguments: argparse.Namespace) -> Nodes | None:
    """Which node this is; None on a single machine.

    Raises:
        InputError: the options do not fit together.
        PipelineError: there is no good secret, or Slurm started a wrong number of tasks.
    """
    from rota.runtime.launching.nodes import MOST_NODES, Nodes
    from rota.runtime.launching.shared_secret import given_secret
    from rota.runtime.launching.slurm import step_of

    step = None if arguments.nodes is not None else step_of(os.environ)
    if step is None and (arguments.nodes or 1) == 1:
        for option, value in (
            ("node", arguments.node),
            ("head", arguments.head),
            ("secret-file", arguments.secret_file),
        ):
            if value is not None:
                raise InputError(
                    f"--{option} is for several machines; give their number with --nodes N, or leave --{option} out"
                )
        return None
    num_nodes, node, head = arguments.nodes, arguments.node, arguments.head
    if step is not None:
        num_nodes, node = step.num_nodes, step.node if node is None else node
        head = head or Head(step.host, step.port)
    if num_nodes > MOST_NODES:
        raise InputError(f"--nodes {num_nodes}: give {MOST_NODES} at most")
    if node is None or not node < num_nodes:
        raise InputError(f"--nodes {num_nodes}: give this machine's number, from 0 to {num_nodes - 1}, with --node I")
    if head is None:
        raise InputError(f"--nodes {num_nodes}: say where node 0 listens, with --head HOST:PORT, the same on all nodes")
    return Nodes(num_nodes, node, head.host, head.port, given_secret(arguments.secret_file))
