"""Stages of Llama as one writes them after reading its source."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.masking_utils import create_causal_mask


class Middle(nn.Module):
    """Some of the layers."""

    def __init__(self, model: LlamaForCausalLM, layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleList(model.model.layers[number] for number in layers)
        self.rotary_emb, self.config = model.model.rotary_emb, model.config

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Hidden states to hidden states."""
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        causal = create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=mask, past_key_values=None, position_ids=positions
        )
        embeddings = self.rotary_emb(x, position_ids=positions)
        for layer in self.layers:
            x = layer(
                x,
                attention_mask=causal,
                position_embeddings=embeddings,
                position_ids=positions,
                past_key_values=None,
                use_cache=False,
            )
        return x


class First(nn.Module):
    """The embedding and the first layers."""

    def __init__(self, model: LlamaForCausalLM, layers: range) -> None:
        super().__init__()
        self.embed_tokens, self.layers = model.model.embed_tokens, Middle(model, layers)

    def forward(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        """Tokens to hidden states."""
        return self.layers(self.embed_tokens(input_ids), mask)


class Last(nn.Module):
    """The last layers and the head."""

    def __init__(self, model: LlamaForCausalLM, layers: range) -> None:
        super().__init__()
        self.layers, self.norm, self.lm_head = Middle(model, layers), model.model.norm, model.lm_head

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Hidden states to logits."""
        return self.lm_head(self.norm(self.layers(x, mask)))
