"""Several samples in one row, each attending only to itself: no padding, and no mask of the whole row.

    samples  a b c, d e, f g h i      input_ids  a b d f g h      position_ids  0 1 0 0 1 2      targets  b c e g h i

Attention runs sample by sample, so it costs what `rota.Size.packed` counts: the squares of the samples' own lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from rota.core.errors import PipelineError

_IGNORED = -100  # as the losses of PyTorch and transformers ignore it
_NAME = "rota_packed"
#: What transformers gives every attention function, and what changes nothing about one in training.
_HARMLESS = frozenset(("use_cache", "output_attentions", "output_hidden_states", "return_dict", "cache_position"))


def pack_samples(
    samples: Sequence[torch.Tensor], length: int | None = None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Make a micro-batch of one row in which samples follow one another, to predict each token from those before it.

    It is the `collate` of `rota.Planner(…, packed=True, length_of=lambda sample: len(sample) - 1)`.

    Args:
        samples: Token ids of each, [length + 1].
        length: Pad the row to this length, by positions that belong to no sample. None: it is not padded.

    Returns:
        Inputs, with `input_ids` and `position_ids` of shape [1, length], and targets of the same shape, which are -100
        where the row is padded.

    Raises:
        PipelineError: A sample has fewer than two tokens, or the samples are longer than `length`.
    """
    for i, sample in enumerate(samples):
        if sample.dim() != 1 or len(sample) < 2:
            raise PipelineError(f"sample {i} has the shape {list(sample.shape)}; give two token ids or more in one dim")
    lengths = [len(sample) - 1 for sample in samples]
    padding = (sum(lengths) if length is None else length) - sum(lengths)
    if padding < 0:
        raise PipelineError(f"the samples have {sum(lengths)} positions together, but the row has {length}")
    like = samples[0]
    ids = torch.cat([*(sample[:-1] for sample in samples), like.new_zeros(padding)])
    targets = torch.cat([*(sample[1:] for sample in samples), like.new_full((padding,), _IGNORED)])
    places = torch.cat([torch.arange(length, device=like.device) for length in (*lengths, padding)])
    return {"input_ids": ids[None], "position_ids": places[None]}, targets[None]


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position_ids: torch.Tensor,
    *,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> torch.Tensor:
    """Causal attention in which every sample of a row attends only to itself.

    Args:
        query: [1, heads, length, width].
        key: [1, heads, length, width], or fewer heads, which then serve several of `query`.
        value: As `key`.
        position_ids: [1, length], as `pack_samples` makes them: each token's position in its sample.
        dropout_p: As for `torch.nn.functional.scaled_dot_product_attention`.
        scale: As for that.

    Returns:
        [1, heads, length, width].

    Raises:
        PipelineError: There are several rows, or `position_ids` do not count each sample from 0.
    """
    lengths = _lengths_of(position_ids)
    if not len(query) == len(key) == 1 or not query.shape[-2] == key.shape[-2] == sum(lengths):
        raise PipelineError(
            f"packed attention gets a query of shape {list(query.shape)} and a key of shape {list(key.shape)} for "
            f"{sum(lengths)} positions; give one row, without keys of earlier calls"
        )
    parts = zip(*(tensor.split_with_sizes(lengths, -2) for tensor in (query, key, value)), strict=True)
    shares = query.shape[1] != key.shape[1]
    return torch.cat(
        [
            functional.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout_p, is_causal=True, scale=scale, enable_gqa=shares
            )
            for q, k, v in parts
        ],
        -2,
    )


def use_packed_attention(model: nn.Module) -> None:
    """Let a causal model of transformers use `packed_attention`; its batches then have `position_ids`.

    Args:
        model: A model of transformers, before it is split. The first forward refuses attention with windows, soft caps
            or sinks.

    Raises:
        PipelineError: The model does not take attention functions from outside.
    """
    from transformers import AttentionInterface

    if not getattr(model, "_supports_attention_backend", False):
        raise PipelineError(
            f"{type(model).__name__} does not take attention functions from outside; call rota.packed_attention in "
            f"its attention"
        )
    AttentionInterface.register(_NAME, _of_transformers)
    pretrained: Any = model
    pretrained.set_attn_implementation(_NAME)


def _of_transformers(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """As transformers calls an attention function; the result is [1, length, heads, width]."""
    scale, dropout, position_ids = (options.pop(name, None) for name in ("scaling", "dropout", "position_ids"))
    unknown = [name for name, option in options.items() if option is not None and name not in _HARMLESS]
    unknown += ["attention_mask"] if mask is not None else []
    if unknown or not getattr(module, "is_causal", True):
        what = ", ".join(unknown) or "attention that is not causal"
        raise PipelineError(
            f"{type(module).__name__} has {what}, which packed attention does not do; pad the samples of this model"
        )
    if position_ids is None:
        raise PipelineError(
            f"{type(module).__name__} does not pass position_ids on, or the batch has none, so where samples begin is "
            f"unknown; give the batches of rota.pack_samples, or pad the samples of this model"
        )
    attended = packed_attention(query, key, value, position_ids, dropout_p=dropout or 0.0, scale=scale)
    return attended.transpose(1, 2).contiguous(), None


def _lengths_of(position_ids: torch.Tensor) -> list[int]:
    """The lengths of the samples, and of what is padded. Raises PipelineError."""
    if position_ids.dim() != 2 or len(position_ids) != 1:
        raise PipelineError(f"position_ids has the shape {list(position_ids.shape)}; give one row, [1, length]")
    lengths: list[int] = []
    for i, place in enumerate(position_ids[0].tolist()):
        if place == 0:
            lengths.append(0)
        if not lengths or place != lengths[-1]:
            raise PipelineError(
                f"position_ids[0, {i}] is {place}; count the positions of each sample from 0, as rota.pack_samples does"
            )
        lengths[-1] += 1
    return lengths
