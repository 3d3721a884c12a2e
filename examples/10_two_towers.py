"""Two towers that look at the two halves of a digit: branches run at the same time, one on each device.

paceline train examples/10_two_towers.py --plan "place=2" --devices cpu:0-1
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split

import paceline as pl


def tower(width: int) -> nn.Module:
    """32 pixels become `width` features."""
    return nn.Sequential(
        nn.Linear(32, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)
    )


class TwoTowers(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.upper, self.lower = tower(width), tower(width)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, upper: Tensor, lower: Tensor) -> Tensor:
        return self.head(torch.cat([self.upper(upper), self.lower(lower)], dim=1))


def halves(samples: list[tuple[Tensor, Tensor]]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """A batch whose input is a pair: the rows above the middle of the images, and those below."""
    pixels = torch.stack([image for image, _ in samples])
    return (pixels[:, :32], pixels[:, 32:]), torch.stack([digit for _, digit in samples])


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(dim=1) == target).float().mean()


def job(width: int = 512, batch: int = 256, epochs: int = 10) -> pl.Job:
    pixels, digits = load_digits(return_X_y=True)
    samples = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits))
    train_set, test_set = random_split(
        samples, [0.8, 0.2], generator=torch.Generator().manual_seed(0)
    )
    return pl.Job(
        model=lambda: TwoTowers(width),
        data=train_set,
        validation=test_set,
        collate=halves,
        loss=F.cross_entropy,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        batch=batch,
        epochs=epochs,
        metrics={"accuracy": accuracy},
    )
