"""Unmodified models with tiny configs: from transformers and peft, and two in the style of other code bases.

Each has its batch as keyword arguments, with padding where the model has a mask, its loss, and where it may be cut.
Without dropout, so that whole and split give equal numbers; `make_model` seeds, and gives fp64 in training mode.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 61


@dataclass(frozen=True)
class ModelCase:
    """A model, and how to make batches for it.

    `make_batch(rows, length, seed)` gives its keyword arguments, `make_targets(batch)` what the loss takes besides the
    output. `cuts` are patterns, as `rota.split` takes them. `mixes_rows`: the loss of a batch is not the mean of losses
    of its rows, so compare with the same micro-batches. `make` takes `num_blocks`, over all stacks of blocks.
    """

    make: Callable[..., nn.Module]
    make_batch: Callable[[int, int, int], dict[str, Any]]
    cuts: tuple[str, ...]
    loss_fn: Callable[[Any, Any], Tensor]
    mixes_rows: bool = False

    def make_model(self, seed: int = 0, num_blocks: int | None = None) -> nn.Module:
        """The model in fp64 and training mode. `num_blocks`: None for few, enough for four stages."""
        torch.manual_seed(seed)
        model = self.make() if num_blocks is None else self.make(num_blocks=num_blocks)
        return model.double().train()

    def make_targets(self, batch: dict[str, Any]) -> Tensor:
        """What `loss_fn` takes besides the model's output: one row per example."""
        first = next(value for value in batch.values() if isinstance(value, Tensor))
        return torch.arange(len(first))


def own_loss(output: Any, targets: Tensor) -> Tensor:
    """The loss that the model makes of its `labels`."""
    loss: Tensor = output.loss
    return loss


def logits_loss(output: Any, targets: Tensor) -> Tensor:
    """A loss of all logits that differs by row."""
    logits = output.logits if hasattr(output, "logits") else output
    rows = logits.log_softmax(-1).square().flatten(1).mean(1)
    return (rows * (1 + targets % 3)).mean()


def clip_loss(output: Any, targets: Tensor) -> Tensor:
    """As far as image and text of a row agree: of each row alone, unlike CLIP's own."""
    return ((output.text_embeds * output.image_embeds).sum(-1) * (1 + targets % 3)).mean()


def padded_mask(rows: int, length: int) -> Tensor:
    """Row i has i % 3 padded places at its end."""
    return (torch.arange(length) < length - torch.arange(rows)[:, None] % 3).long()


def text(rows: int, length: int, seed: int, *, labels: bool = False) -> dict[str, Any]:
    """Token ids with padding, and labels if asked."""
    torch.manual_seed(seed)
    ids, mask = torch.randint(3, VOCABULARY, (rows, length)), padded_mask(rows, length)
    batch = {"input_ids": ids, "attention_mask": mask}
    return batch | {"labels": ids.masked_fill(mask == 0, -100)} if labels else batch


def two_texts(rows: int, length: int, seed: int) -> dict[str, Any]:
    """For an encoder and a decoder, of different lengths, with labels."""
    batch = text(rows, length, seed)
    labels = torch.randint(3, VOCABULARY, (rows, length - 1)).masked_fill(padded_mask(rows, length - 1) == 0, -100)
    return batch | {"labels": labels}


def classified_text(rows: int, length: int, seed: int) -> dict[str, Any]:
    """Texts, and the class of each."""
    return text(rows, length, seed) | {"labels": torch.arange(rows) % 3}


def image(rows: int, side: int, seed: int, *, key: str = "pixel_values", channels: int = 3) -> dict[str, Any]:
    """Square images."""
    torch.manual_seed(seed)
    return {key: torch.randn(rows, channels, side, side, dtype=torch.float64)}


def classified_image(rows: int, length: int, seed: int, *, side: int | None = None) -> dict[str, Any]:
    """Images of a given side, or of one that goes with `length`, and the class of each.

    Large enough that BatchNorm never has just two numbers: their difference would amplify rounding a millionfold.
    """
    return image(rows, side or 48 + 16 * (length % 3), seed) | {"labels": torch.arange(rows) % 3}


def speech(rows: int, length: int, seed: int) -> dict[str, Any]:
    """Spectra, and what is said."""
    torch.manual_seed(seed)
    features = torch.randn(rows, 8, 32, dtype=torch.float64)
    return {"input_features": features, "labels": torch.randint(3, VOCABULARY, (rows, length))}


def captions(rows: int, length: int, seed: int) -> dict[str, Any]:
    """Images and texts."""
    return text(rows, length, seed) | image(rows, 8, seed)


def contrasted(rows: int, length: int, seed: int) -> dict[str, Any]:
    """Images and texts for CLIP's own loss, which compares each row with all others."""
    return captions(rows, length, seed) | {"return_loss": True}


def noisy(rows: int, length: int, seed: int) -> dict[str, Any]:
    """For a diffusion model: noisy images and the time of each."""
    sample = image(rows, 8 + 8 * (length % 2), seed, key="sample", channels=2)
    return sample | {"timestep": torch.arange(rows) % 7}


_TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}


def gpt2(num_blocks: int = 4, **options: Any) -> nn.Module:
    """GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": num_blocks, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**_TOKENS | sizes | dropout | options))


def lora_gpt2(num_blocks: int = 4) -> nn.Module:
    """GPT-2 with LoRA on its attention, by peft: only the adapters are trained."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    with warnings.catch_warnings():  # of transformers, about what peft calls
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(gpt2(num_blocks), config)


_WIDTHS = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
_DECODER = _TOKENS | _WIDTHS | {"num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
_AUX_LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
_ROUTED = {"num_experts_per_tok": 2, "experts_implementation": "eager", **_AUX_LOSS}


def decoder(name: str, num_blocks: int = 4, **options: Any) -> nn.Module:
    """A decoder-only model of transformers, by the beginning of its class's name."""
    import transformers

    config = getattr(transformers, options.pop("config", f"{name}Config"))(
        num_hidden_layers=num_blocks, **_DECODER | options
    )
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return model


def t5(num_blocks: int = 6) -> nn.Module:
    """T5: two stacks, a shared position bias in each, and embeddings that encoder, decoder and head share."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 4}
    sizes |= {"num_layers": num_blocks // 2, "num_decoder_layers": num_blocks // 2}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, pad_token_id=0, decoder_start_token_id=0))


def two_stacks(num_blocks: int) -> dict[str, Any]:
    """As many blocks in the encoder as in the decoder."""
    stack = {"layers": num_blocks // 2, "attention_heads": 4, "ffn_dim": 24}
    sizes = {f"{name}_{size}": number for name in ("encoder", "decoder") for size, number in stack.items()}
    dropout = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    return _TOKENS | sizes | dropout | {"d_model": 16, "pad_token_id": 0, "decoder_start_token_id": 1}


def bart(num_blocks: int = 6) -> nn.Module:
    """BART: an encoder and a decoder."""
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {"max_position_embeddings": 64, "forced_eos_token_id": None}
    return BartForConditionalGeneration(BartConfig(**two_stacks(num_blocks) | sizes))


def whisper(num_blocks: int = 6) -> nn.Module:
    """Whisper: an encoder of spectra and a decoder of texts."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
    return WhisperForConditionalGeneration(WhisperConfig(**two_stacks(num_blocks) | sizes))


_ENCODER = _WIDTHS | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(num_blocks: int = 4) -> nn.Module:
    """BERT with its pooler, which classifies texts."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"num_hidden_layers": num_blocks, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "num_labels": 3}
    return BertForSequenceClassification(BertConfig(**_ENCODER | sizes))


def vit(num_blocks: int = 4) -> nn.Module:
    """A vision transformer that classifies images."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"num_hidden_layers": num_blocks, "image_size": 8, "patch_size": 4, "num_labels": 3}
    return ViTForImageClassification(ViTConfig(**_ENCODER | sizes))


def resnet(num_blocks: int = 6) -> nn.Module:
    """A residual network with batch normalization, in four groups of blocks."""
    from transformers import ResNetConfig, ResNetForImageClassification

    depths = [2, 2, (num_blocks - 4) // 2, (num_blocks - 4) // 2]
    sizes = {"embedding_size": 4, "hidden_sizes": [4, 8, 8, 8], "depths": depths, "num_labels": 3}
    return ResNetForImageClassification(ResNetConfig(layer_type="basic", **sizes))


def clip(num_blocks: int = 4) -> nn.Module:
    """CLIP: a tower for texts and one for images."""
    from transformers import CLIPConfig, CLIPModel

    tower = _WIDTHS | {"num_hidden_layers": num_blocks // 2, "projection_dim": 8}
    text_config = tower | _TOKENS | {"max_position_embeddings": 32}
    image_config = tower | {"image_size": 8, "patch_size": 4}
    return CLIPModel(CLIPConfig(text_config=text_config, vision_config=image_config, projection_dim=8))


class NanoBlock(nn.Module):
    """A block as nanoGPT has it, with functional dropout."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Causal attention and a feed-forward, each added to `x`."""
        q, k, v = self.attend(self.ln_1(x)).split(x.shape[-1], dim=2)
        dropout = self.dropout if self.training else 0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + F.dropout(self.project(attended), self.dropout, training=self.training)
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class NanoGPT(nn.Module):
    """GPT in the style of nanoGPT: tied by assignment, with an assertion on the length, and the loss in its forward."""

    def __init__(self, block_size: int = 16, width: int = 16, num_blocks: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.block_size = block_size
        blocks = nn.ModuleList(NanoBlock(width, dropout) for _ in range(num_blocks))
        parts = {"wte": nn.Embedding(VOCABULARY, width), "wpe": nn.Embedding(block_size, width)}
        self.transformer = nn.ModuleDict(
            parts | {"drop": nn.Dropout(dropout), "h": blocks, "ln_f": nn.LayerNorm(width)}
        )
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits and, where there are targets, the loss."""
        device = idx.device
        _, t = idx.size()
        assert t <= self.block_size, f"Cannot forward sequence of length {t}, block size is only {self.block_size}"
        pos = torch.arange(0, t, dtype=torch.long, device=device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def nano_batch(rows: int, length: int, seed: int) -> dict[str, Any]:
    """Token ids and the next ones."""
    ids = text(rows, length + 1, seed)["input_ids"]
    return {"idx": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


class UNetBlock(nn.Module):
    """Two convolutions and what the time adds, with an in-place activation."""

    def __init__(self, channels_in: int, channels: int, width: int) -> None:
        super().__init__()
        self.norm, self.act = nn.GroupNorm(1, channels_in), nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.time = nn.Linear(width, channels)
        self.skip = nn.Conv2d(channels_in, channels, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """The image with `channels` channels."""
        return self.skip(x) + self.conv(self.act(self.norm(x))) + self.time(time)[:, :, None, None]


class UNet(nn.Module):
    """A diffusion model: down, middle and up, with a skip from each block on the way down."""

    def __init__(self, channels: int = 4, width: int = 8, num_blocks: int = 7) -> None:
        super().__init__()
        self.width = width
        self.time_embedding = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.conv_in = nn.Conv2d(2, channels, 3, padding=1)
        self.down = nn.ModuleList(UNetBlock(channels, channels, width) for _ in range(num_blocks // 2))
        self.middle = UNetBlock(channels, channels, width)
        self.up = nn.ModuleList(UNetBlock(2 * channels, channels, width) for _ in range(num_blocks // 2))
        self.conv_out = nn.Conv2d(channels, 2, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        """The noise in `sample`."""
        angles = timestep[:, None].to(sample.dtype) * torch.arange(1, self.width + 1, device=sample.device)
        time = self.time_embedding(angles.sin())
        x = self.conv_in(sample)
        skips = []
        for depth, block in enumerate(self.down):
            x = block(x, time)
            skips.append(x)
            if depth < 2:
                x = F.avg_pool2d(x, 2)
        x = self.middle(x, time)
        for block in self.up:
            skip = skips.pop()
            if x.shape[-1] != skip.shape[-1]:
                x = F.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, skip], dim=1), time)
        return self.conv_out(x)


def unet_loss(output: Any, targets: Tensor) -> Tensor:
    """A loss by row."""
    return (output.square().flatten(1).mean(1) * (1 + targets % 3)).mean()


def nano_loss(output: Any, targets: Tensor) -> Tensor:
    """The loss that the forward returns."""
    loss: Tensor = output[1]
    return loss


_LAYERS = ("model.layers.*",)
_STACKS = ("model.encoder.layers.*", "model.decoder.layers.*")
_labeled = partial(text, labels=True)

CASES: dict[str, ModelCase] = {
    "gpt2": ModelCase(gpt2, _labeled, ("transformer.h.*",), own_loss, mixes_rows=True),
    "nanogpt": ModelCase(NanoGPT, nano_batch, ("transformer.h.*",), nano_loss),
    "llama": ModelCase(partial(decoder, "Llama"), text, _LAYERS, logits_loss),
    "mistral": ModelCase(partial(decoder, "Mistral", sliding_window=4), text, _LAYERS, logits_loss),
    "qwen3_moe": ModelCase(
        partial(
            decoder, "Qwen3Moe", num_experts=4, moe_intermediate_size=12, head_dim=4, norm_topk_prob=True, **_ROUTED
        ),
        _labeled,
        _LAYERS,
        own_loss,
        mixes_rows=True,
    ),
    "mixtral": ModelCase(
        partial(decoder, "Mixtral", num_local_experts=4, **_ROUTED), _labeled, _LAYERS, own_loss, mixes_rows=True
    ),
    "gemma2": ModelCase(partial(decoder, "Gemma2", head_dim=4, sliding_window=4), text, _LAYERS, logits_loss),
    "gemma3": ModelCase(
        partial(decoder, "Gemma3", config="Gemma3TextConfig", head_dim=4, sliding_window=4), text, _LAYERS, logits_loss
    ),
    "t5": ModelCase(t5, two_texts, ("encoder.block.*", "decoder.block.*"), own_loss, mixes_rows=True),
    "bart": ModelCase(bart, two_texts, _STACKS, own_loss, mixes_rows=True),
    "whisper": ModelCase(whisper, speech, _STACKS, own_loss),
    "bert": ModelCase(bert, classified_text, ("bert.encoder.layer.*",), own_loss),
    "vit": ModelCase(vit, partial(classified_image, side=8), ("vit.layers.*",), own_loss),
    "resnet": ModelCase(resnet, classified_image, ("resnet.encoder.stages.*.layers.*",), own_loss, mixes_rows=True),
    "clip": ModelCase(clip, captions, ("text_model.encoder.layers.*", "vision_model.encoder.layers.*"), clip_loss),
    "clip_contrastive": ModelCase(
        clip, contrasted, ("text_model.encoder.layers.*", "vision_model.encoder.layers.*"), own_loss, mixes_rows=True
    ),
    "unet": ModelCase(UNet, noisy, ("down.*", "middle", "up.*"), unet_loss),
    "lora_gpt2": ModelCase(lora_gpt2, _labeled, ("base_model.model.transformer.h.*",), own_loss, mixes_rows=True),
}
