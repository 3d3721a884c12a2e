"""A small GPT that learns to write Python from the bytes of Python's own standard library.

paceline train examples/02_gpt_bytes.py --plan data=2 --devices cpu:0-1
"""

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline as pl

STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))


class Windows(Dataset):
    """A text cut into windows; an item is (bytes, the same bytes one place later)."""

    def __init__(self, folder: Path, sequence: int):
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.sequence = sequence

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.sequence

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.sequence
        window = self.bytes[start : start + self.sequence + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, sequence: int, heads: int = 4):
        super().__init__()
        self.byte, self.place = nn.Embedding(256, width), nn.Embedding(sequence, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, bytes_: Tensor) -> Tensor:
        x = self.byte(bytes_) + self.place.weight[: bytes_.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def next_byte_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Nats a byte. All windows are equally long, so the mean over bytes is also the mean over samples."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def job(
    width: int = 256,
    layers: int = 4,
    sequence: int = 128,
    batch: int = 32,
    steps: int = 200,
    lr: float = 1e-3,
    momentum: float = 0.9,
) -> pl.Job:
    return pl.Job(
        model=lambda: GPT(width, layers, sequence),
        data=Windows(STANDARD_LIBRARY, sequence),
        loss=next_byte_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=lr, betas=(momentum, 0.999)),
        batch=batch,
        steps=steps,
        validation=Windows(
            STANDARD_LIBRARY / "json", sequence
        ),  # a package that it never sees in training
    )
