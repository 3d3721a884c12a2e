"""Replicas over slow links that meet every 20 steps (DiLoCo), in a model of the next byte of Python's own library.

paceline plan examples/11_diloco.py --cluster examples/11_slow_links.toml --relaxed      # what these links allow
paceline train examples/11_diloco.py --plan "data=2 local=20 outer=diloco compress=int8" --devices cpu:0-1
"""

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline as pl

CONTEXT = 16  # bytes that the model sees
LIBRARY = Path(sysconfig.get_path("stdlib"))


class NextByte(Dataset):
    """An item is (some bytes, the byte after them)."""

    def __init__(self, folder: Path, stride: int):
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
        self.bytes, self.stride = torch.frombuffer(bytearray(text), dtype=torch.uint8), stride

    def __len__(self) -> int:
        return (len(self.bytes) - CONTEXT) // self.stride

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.stride
        return self.bytes[start : start + CONTEXT].long(), self.bytes[start + CONTEXT].long()


def net(width: int) -> nn.Module:
    """As in Bengio et al. 2003: the vectors of the last bytes, and two layers."""
    return nn.Sequential(
        nn.Embedding(256, 32),
        nn.Flatten(),
        nn.Linear(CONTEXT * 32, width),
        nn.GELU(),
        nn.Linear(width, width),
        nn.GELU(),
        nn.Linear(width, 256),
    )


def job(width: int = 512, batch: int = 256, steps: int = 400, lr: float = 2e-3) -> pl.Job:
    return pl.Job(
        model=lambda: net(width),
        data=NextByte(LIBRARY, stride=5),
        validation=NextByte(LIBRARY / "json", stride=5),
        loss=F.cross_entropy,
        optimizer=lambda named: torch.optim.AdamW(named, lr=lr),
        batch=batch,
        steps=steps,
    )
