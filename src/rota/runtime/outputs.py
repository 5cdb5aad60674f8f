"""Outputs of a last stage, brought to the ranks that ask for them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from rota.runtime.transport import together


def bring(made: dict[int, Any], ranks: tuple[int, ...], asking: list[int], group: dist.ProcessGroup) -> dict[int, Any]:
    """The outputs by micro-batch that `ranks` have `made`, on each rank that is `asking` too. Collective."""
    here, rank = made, dist.get_rank(group)
    for receiver in asking:
        if receiver not in ranks:
            parcel = [made]
            with together(f"bringing outputs from rank {ranks[0]} to rank {receiver}"):
                if rank == ranks[0]:
                    dist.send_object_list(parcel, group_dst=receiver, group=group)
                elif rank == receiver:
                    dist.recv_object_list(parcel, group_src=ranks[0], group=group)
                    here = parcel[0]
    return here
