"""The space of architectures: 192 small nets on handwritten digits, which differ in five choices inside the model.

Two blocks, each of one operation and perhaps a residual connection, an activation and a kind of pooling. All else is
fixed, and was fixed before the first net was trained.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split

import paceline as pl

WIDTH = 12
OPERATIONS = ("conv3", "conv1", "depthwise3", "skip")
SPACE = {
    "block1.op": OPERATIONS,
    "block2.op": OPERATIONS,
    "net.residual": (False, True),
    "net.activation": ("relu", "tanh", "sigmoid"),
    "net.pool": ("max", "mean"),
}
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}
POOLS = {"max": nn.MaxPool2d, "mean": nn.AvgPool2d}

pixels, digits = load_digits(return_X_y=True)
images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
train_set, validation_set, test_set = random_split(
    TensorDataset(images, torch.tensor(digits)),
    [0.6, 0.2, 0.2],
    generator=torch.Generator().manual_seed(0),
)


class Block(nn.Module):
    """An operation and an activation, with the input added if the block is residual."""

    def __init__(self, op: str, activation: nn.Module, is_residual: bool) -> None:
        super().__init__()
        self.op, self.activation, self.is_residual = operation(op), activation, is_residual

    def forward(self, x: Tensor) -> Tensor:
        activated = self.activation(self.op(x))
        return x + activated if self.is_residual else activated


def operation(name: str) -> nn.Module:
    """A map of images to images of the same shape."""
    if name == "skip":
        return nn.Identity()
    if name == "conv1":
        return nn.Conv2d(WIDTH, WIDTH, 1)
    return nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH if name == "depthwise3" else 1)


def net() -> nn.Module:
    """8x8 pixels to WIDTH channels, a block, pooling to 4x4, a block, pooling to 2x2, and a linear layer."""
    chosen = {name: pl.choice(name, options) for name, options in SPACE.items()}
    activation, pool = ACTIVATIONS[chosen["net.activation"]], POOLS[chosen["net.pool"]]
    blocks = [
        Block(chosen[f"block{number}.op"], activation(), chosen["net.residual"])
        for number in (1, 2)
    ]
    return nn.Sequential(
        nn.Conv2d(1, WIDTH, 1),
        blocks[0],
        pool(2),
        blocks[1],
        pool(2),
        nn.Flatten(),
        nn.Linear(4 * WIDTH, 10),
    )


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(dim=1) == target).float().mean()


def job(seed: Literal[0, 1, 2] = 0) -> pl.Job:
    """seed: of the initial weights and of the order of samples."""
    return pl.Job(
        model=net,
        data=train_set,
        loss=F.cross_entropy,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        batch=32,
        epochs=10,
        validation=validation_set,
        test=test_set,
        metrics={"accuracy": accuracy},
        seed=seed,
    )
