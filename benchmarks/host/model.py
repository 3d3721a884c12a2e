"""The one model that all contenders train: blocks so small that a step is the host's work alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

VOCABULARY, WIDTH, HEADS, BLOCKS, SEQUENCE, BATCH = 64, 32, 4, 8, 8, 4
WARM_UP_STEPS = 10


class Block(nn.Module):
    """Attention whose projections are modules of their own, as torch's guide to tensor parallelism has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.mix = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        q, k, v = (
            make(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for make in (self.q, self.k, self.v)
        )
        x = x + self.mix(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.table(tokens)))).flatten(0, 1)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target.flatten())


def data(steps: int) -> TensorDataset:
    tokens = torch.randint(
        VOCABULARY, (BATCH * steps, SEQUENCE + 1), generator=torch.Generator().manual_seed(0)
    )
    return TensorDataset(tokens[:, :-1].clone(), tokens[:, 1:].clone())
