"""Outputs of the last stage, from the ranks that made them to those that ask."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from rota.runtime.transport import together


def bring(made: dict[int, Any], ranks: tuple[int, ...], asking: list[int], group: dist.ProcessGroup) -> dict[int, Any]:
    """What one last stage on `ranks` made, on all ranks that ask. Collective; ranks count within `group`."""
    here, rank = made, dist.get_rank(group)
    for other in asking:
        if other not in ranks:
            parcel = [made]
            with together(f"bringing outputs from rank {ranks[0]} to rank {other}"):
                if rank == ranks[0]:
                    dist.send_object_list(parcel, group_dst=other, group=group)
                elif rank == other:
                    dist.recv_object_list(parcel, group_src=ranks[0], group=group)
                    here = parcel[0]
    return here
