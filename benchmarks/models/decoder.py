"""A decoder transformer with given dimensions in GPT's or Llama's form: an ordinary module that any
plan can run.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.sizes import DecoderSize

ROTARY_BASE = 10_000.0
LORA_SCALE = 2.0  # alpha over rank, of NeMo's recipes: alpha 16 with rank 8


class Adapted(nn.Module):
    """A linear layer with an adapter of low rank beside it (Hu et al. 2021); it starts as the layer
    alone.
    """

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(x)) * LORA_SCALE


class Attention(nn.Module):
    """Causal attention; groups of heads may share keys and values."""

    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        bias = size.form == "gpt"
        self.head_dim, self.widths = size.head_dim, (size.hidden, size.kv_width, size.kv_width)
        self.groups = size.heads // size.kv_heads
        qkv = nn.Linear(size.hidden, sum(self.widths), bias=bias)
        self.qkv = Adapted(qkv, size.lora_rank) if size.lora_rank else qkv
        self.mix = nn.Linear(size.hidden, size.hidden, bias=bias)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return attention's output for x, both (batch, sequence, hidden).

        Args:
            rotation: Cosines and sines, each (sequence, head_dim).
        """
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in self.qkv(x).split(self.widths, -1)
        )
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.groups > 1)
        return self.mix(mixed.transpose(1, 2).flatten(2))


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Apply rotary positions to x, which is (batch, heads, sequence, head_dim)."""
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat((-second, first), -1) * sines


class GeluMlp(nn.Module):
    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size.hidden, size.ffn), nn.Linear(size.ffn, size.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class SwigluMlp(nn.Module):
    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(size.hidden, size.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(size.ffn, size.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class DecoderBlock(nn.Module):
    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        norm = nn.LayerNorm if size.form == "gpt" else nn.RMSNorm
        self.norm1, self.norm2 = norm(size.hidden), norm(size.hidden)
        self.attention = Attention(size)
        self.mlp = GeluMlp(size) if size.form == "gpt" else SwigluMlp(size)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), rotation)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A model that maps token numbers (batch, sequence) to logits (batch, sequence, vocab).

    >>> Decoder(DecoderSize(1, 8, 2, 32, 10, sequence=4))(torch.zeros(2, 4, dtype=torch.long)).shape
    torch.Size([2, 4, 10])
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocab, size.hidden)
        self.places = nn.Embedding(size.sequence, size.hidden) if size.form == "gpt" else None
        self.blocks = nn.ModuleList(DecoderBlock(size) for _ in range(size.layers))
        self.norm = (nn.LayerNorm if size.form == "gpt" else nn.RMSNorm)(size.hidden)
        self.head = nn.Linear(size.hidden, size.vocab, bias=False)
        if size.tied:
            self.head.weight = self.tokens.weight
        if size.lora_rank:
            self.requires_grad_(False)
            for adapted in (module for module in self.modules() if isinstance(module, Adapted)):
                adapted.down.requires_grad_()
                adapted.up.requires_grad_()
        if size.form == "llama":
            steps = torch.arange(0, size.head_dim, 2) / size.head_dim
            angles = torch.outer(torch.arange(size.sequence).float(), ROTARY_BASE**-steps).repeat(
                1, 2
            )
            self.register_buffer("cosines", angles.cos(), persistent=False)
            self.register_buffer("sines", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, length = self.tokens(tokens), tokens.shape[1]
        rotation = None
        if self.places is not None:
            x = x + self.places.weight[:length]
        else:
            rotation = (self.cosines[:length].to(x.dtype), self.sines[:length].to(x.dtype))
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (batch, sequence, vocab) against targets (batch,
    sequence).
    """
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
