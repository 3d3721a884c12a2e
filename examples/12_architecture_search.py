"""Which operations should a small net consist of? Choices inside the model are parameters of a search.

    paceline search examples/12_architecture_search.py --trials 24 --sampler nsga2 --objective validation_loss \\
        --objective parameters
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split

import paceline as pl

OPERATIONS = {
    "conv3": lambda width: nn.Conv2d(width, width, 3, padding=1),
    "conv5": lambda width: nn.Conv2d(width, width, 5, padding=2),
    "depthwise": lambda width: nn.Conv2d(width, width, 3, padding=1, groups=width),
    "skip": lambda width: nn.Identity(),
}
pixels, digits = load_digits(return_X_y=True)  # loaded once for all trials
samples = TensorDataset(
    torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(digits)
)
train_set, validation_set = random_split(
    samples, [0.8, 0.2], generator=torch.Generator().manual_seed(0)
)


class Block(nn.Module):
    def __init__(self, number: int, width: int):
        super().__init__()
        self.operation = OPERATIONS[pl.choice(f"block{number}.op", list(OPERATIONS))](width)
        self.is_residual = pl.choice(f"block{number}.residual", [True, False])

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.operation(x))
        return x + y if self.is_residual else y


def net(width: int) -> nn.Module:
    num_blocks = pl.choice("net.blocks", [2, 1, 3])
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        *(Block(number, width) for number in range(num_blocks)),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * width, 10),
    )


def job(width: int = 16, epochs: int = 5) -> pl.Job:
    return pl.Job(
        model=lambda: net(width),
        data=train_set,
        validation=validation_set,
        loss=F.cross_entropy,
        optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3),
        batch=64,
        epochs=epochs,
    )
