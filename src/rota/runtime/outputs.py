"""Values of any nesting from one rank to another outside of a plan: the outputs of the last stage, for one.

sender     size of the text ─▶ layout as JSON, or why there is none ─▶ tensor ─▶ tensor …     receiver
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from rota.errors import PipelineError
from rota.runtime.messages import empty, flatten, layout_of, tensor_layouts, unflatten
from rota.runtime.transport import as_sent, together


def bring(
    made: dict[int, Any], ranks: tuple[int, ...], asking: list[int], where: str, group: dist.ProcessGroup
) -> dict[int, Any]:
    """What the last stage `where` on `ranks` made, on all ranks that ask. Collective; ranks count within `group`."""
    here, rank = made, dist.get_rank(group)
    for other in asking:
        if other not in ranks:
            with together(f"bringing outputs from rank {ranks[0]} to rank {other}"):
                if rank == ranks[0]:
                    send_value(made, where, other, group)
                elif rank == other:
                    here = receive_value(ranks[0], group)
    return here


def send_value(value: Any, where: str, receiver: int, group: dist.ProcessGroup) -> None:
    """Tensors, and tuples, lists and dicts of them. Raises PipelineError, here and there, if `value` is another.

    `where` names the stage in errors.
    """
    refusal: PipelineError | None = None
    tensors: list[torch.Tensor] = []
    try:
        tensors, layout = flatten(value, where)
        text = json.dumps({"layout": layout})
    except PipelineError as error:  # the receiver must hear of it, or it would wait
        refusal, text = error, json.dumps({"refusal": str(error)})
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    for tensor in (torch.tensor([data.numel()]), data, *tensors):
        dist.send(as_sent(tensor.detach()), group_dst=receiver, group=group)
    if refusal is not None:
        raise refusal


def receive_value(sender: int, group: dist.ProcessGroup) -> Any:
    """What `send_value` sends."""
    size = torch.empty(1, dtype=torch.int64)
    dist.recv(size, group_src=sender, group=group)
    data = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(data, group_src=sender, group=group)
    told = json.loads(data.numpy().tobytes())
    if "refusal" in told:
        raise PipelineError(told["refusal"])
    layout = layout_of(told["layout"])
    tensors = [empty(each) for each in tensor_layouts(layout)]
    for tensor in tensors:
        dist.recv(as_sent(tensor), group_src=sender, group=group)
    wanting = (tensor.requires_grad_(each[3]) for tensor, each in zip(tensors, tensor_layouts(layout), strict=True))
    return unflatten(wanting, layout)
