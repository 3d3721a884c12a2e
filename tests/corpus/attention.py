"""Attention and transformers of torch's own parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline

from .registry import FEATURES, SAMPLES, adamw, entry, integers, make_job, numbers
from .sharing import token_loss, tokens

HEADS, LENGTH = 2, 5


class Attention(nn.Module):
    """Causal attention with fewer key heads than query heads and rotary places, if asked for."""

    def __init__(
        self, *, key_heads: int = HEADS, rotary: bool = False, causal: bool = True
    ) -> None:
        super().__init__()
        self.head, self.key_heads, self.rotary, self.causal = (
            FEATURES // HEADS,
            key_heads,
            rotary,
            causal,
        )
        self.q = nn.Linear(FEATURES, FEATURES, bias=False)
        self.kv = nn.Linear(FEATURES, 2 * key_heads * self.head, bias=False)
        self.out = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, HEADS, self.head).transpose(1, 2)
        k, v = (
            self.kv(x)
            .view(batch, length, 2 * self.key_heads, self.head)
            .transpose(1, 2)
            .chunk(2, 1)
        )
        if self.rotary:
            q, k = _rotated(q), _rotated(k)
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, enable_gqa=self.key_heads != HEADS
        )
        return self.out(attended.transpose(1, 2).reshape(batch, length, FEATURES))


def _rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] / 10 ** torch.arange(
        half, dtype=x.dtype
    )
    first, second = x.chunk(2, -1)
    return torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            first * angles.sin() + second * angles.cos(),
        ],
        -1,
    )


class Decoder(nn.Module):
    """A pre-norm transformer on tokens."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(20, FEATURES)
        self.places = nn.Parameter(torch.randn(LENGTH, FEATURES) * 0.1)
        self.blocks = nn.ModuleList([_DecoderBlock(**options) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 20)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class _DecoderBlock(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.one, self.attention = nn.LayerNorm(FEATURES), Attention(**options)
        self.two = nn.LayerNorm(FEATURES)
        self.mlp = nn.Sequential(
            nn.Linear(FEATURES, 2 * FEATURES), nn.GELU(), nn.Linear(2 * FEATURES, FEATURES)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.one(x))
        return x + self.mlp(self.two(x))


@entry("causal attention")
def causal_attention() -> paceline.Job:
    return make_job(Decoder, data=tokens(), loss=token_loss, optimizer=adamw)


@entry("rotary places")
def rotary_attention() -> paceline.Job:
    return make_job(lambda: Decoder(rotary=True), data=tokens(), loss=token_loss, optimizer=adamw)


@entry("grouped queries: one key head for two query heads")
def grouped_queries() -> paceline.Job:
    return make_job(lambda: Decoder(key_heads=1), data=tokens(), loss=token_loss)


class Padded(nn.Module):
    """torch's attention layer on sequences of which a part is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, FEATURES)
        self.attention = nn.MultiheadAttention(FEATURES, HEADS, batch_first=True)
        self.mlp, self.last = (
            nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU()),
            nn.Linear(FEATURES, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        padding = x == 0
        hidden = self.table(x)
        hidden = (
            hidden
            + self.attention(hidden, hidden, hidden, key_padding_mask=padding, need_weights=False)[
                0
            ]
        )
        hidden = (hidden + self.mlp(hidden)).masked_fill(padding[..., None], 0)
        return self.last(hidden.sum(1) / (~padding).sum(1, keepdim=True))


def _padded_tokens() -> TensorDataset:
    x = integers(19, SAMPLES, 6) + 1
    x[torch.arange(6) >= integers(5, SAMPLES, seed=6)[:, None] + 2] = 0
    return TensorDataset(x, numbers(SAMPLES, 3, seed=3))


@entry("torch's attention layer with padded keys")
def padded_keys() -> paceline.Job:
    return make_job(Padded, data=_padded_tokens())


@entry("torch's encoder layers with dropout and padding", random_layers=True)
def torch_encoder() -> paceline.Job:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, FEATURES)
            layer = nn.TransformerEncoderLayer(FEATURES, HEADS, 16, dropout=0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.last = nn.Linear(FEATURES, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.encoder(self.table(x), src_key_padding_mask=x == 0)[:, 0])

    return make_job(Encoder, data=_padded_tokens())


@entry("torch's whole transformer, encoder and decoder")
def torch_transformer() -> paceline.Job:
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, FEATURES)
            self.transformer = nn.Transformer(
                FEATURES, HEADS, 2, 2, 16, dropout=0.0, batch_first=True
            )
            self.head = nn.Linear(FEATURES, 20)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(
                target.shape[1], dtype=self.table.weight.dtype
            )
            return self.head(
                self.transformer(self.table(source), self.table(target), tgt_mask=mask)
            )

    x, y = integers(20, SAMPLES, 6), integers(20, SAMPLES, 5, seed=8)
    data = [((a, b[:-1]), b[1:]) for a, b in zip(x, y, strict=True)]
    return make_job(
        Translator,
        data=data,
        loss=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
    )


@entry("attention by hand, with an additive mask")
def attention_by_hand() -> paceline.Job:
    class ByHand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(FEATURES, 3 * FEATURES)
            self.out = nn.Linear(FEATURES, FEATURES)
            self.register_buffer(
                "mask", torch.full((LENGTH, LENGTH), -1e9).triu(1), persistent=False
            )

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.into(x).chunk(3, -1)
            return self.out((q @ k.mT / FEATURES**0.5 + self.mask).softmax(-1) @ v)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, FEATURES)
            self.blocks, self.head = (
                nn.ModuleList([ByHand() for _ in range(3)]),
                nn.Linear(FEATURES, 20),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.table(x)
            for block in self.blocks:
                x = x + block(x)
            return self.head(x)

    return make_job(Model, data=tokens(), loss=token_loss)


@entry("attention in windows, with a bias of relative places")
def windowed_attention() -> paceline.Job:
    class Windowed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)
            self.bias = nn.Parameter(torch.zeros(2 * 4 - 1))
            self.register_buffer("places", torch.arange(4)[:, None] - torch.arange(4) + 3)

        def forward(self, x: Tensor) -> Tensor:
            windows = x.unflatten(1, (2, 4))
            q, k, v = self.qkv(windows).chunk(3, -1)
            attended = (q @ k.mT / 2 + self.bias[self.places]).softmax(-1) @ v
            return x + self.out(attended).flatten(1, 2)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.last = nn.ModuleList([Windowed() for _ in range(3)]), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x).roll(1, 1)
            return self.last(x.mean(1))

    return make_job(Model, data=TensorDataset(numbers(SAMPLES, 8, 4), numbers(SAMPLES, 3, seed=3)))
