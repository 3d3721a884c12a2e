"""A residual convolutional net with given dimensions: an ordinary module, which any plan can run if
it is small.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.convolution import Conv, ConvNetSize, blocks


class ResidualBlock(nn.Module):
    """Convolutions, each with a batch norm, and a shortcut past them."""

    def __init__(self, convs: tuple[Conv, ...], past: Conv | None) -> None:
        super().__init__()
        self.convs = nn.ModuleList(map(_conv, convs))
        self.past = None if past is None else _conv(past)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output; x and the output are (batch, channels, height, width)."""
        y = x
        for conv in self.convs[:-1]:
            y = F.relu(conv(y), inplace=True)
        y = self.convs[-1](y)
        return F.relu(y + (x if self.past is None else self.past(x)), inplace=True)


def _conv(conv: Conv) -> nn.Sequential:
    high, wide = conv.kernel
    return nn.Sequential(
        nn.Conv2d(
            conv.inputs,
            conv.outputs,
            conv.kernel,
            conv.stride,
            padding=(high // 2, wide // 2),
            bias=False,
        ),
        nn.BatchNorm2d(conv.outputs),
    )


class ConvNet(nn.Module):
    """A net that maps images (batch, 3, side, side) to logits (batch, classes).

    >>> import torch
    >>> ConvNet(ConvNetSize(depths=(1, 1), width=4, classes=3, side=32))(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 3])
    """

    def __init__(self, size: ConvNetSize) -> None:
        super().__init__()
        stem, *rest = blocks(size)
        self.stem = _conv(stem.convs[0])
        self.blocks = nn.ModuleList(ResidualBlock(block.convs, block.past) for block in rest)
        self.head = nn.Linear(rest[-1].convs[-1].outputs, size.classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(images), inplace=True), 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))
