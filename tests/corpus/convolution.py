"""Convolutional nets and their norms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline

from .registry import SAMPLES, adamw, entry, make_job, numbers


def _images(outputs: int = 3) -> TensorDataset:
    return TensorDataset(numbers(SAMPLES, 2, 8, 8), numbers(SAMPLES, outputs, seed=3))


class ConvNet(nn.Module):
    """Convolutions with a norm and a head."""

    def __init__(self, norm: type[nn.Module] | None = None, channels: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(
                    nn.Conv2d(channels, channels, 3, padding=1),
                    norm() if norm else nn.Identity(),
                    nn.ReLU(),
                )
                for _ in range(3)
            ]
        )
        self.last = nn.Linear(channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(F.adaptive_avg_pool2d(x, 1).flatten(1))


@entry("two-dimensional convolutions")
def conv2d() -> paceline.Job:
    return make_job(ConvNet, data=_images(), optimizer=adamw)


@entry("convolutions with their channels last")
def channels_last() -> paceline.Job:
    return make_job(
        lambda: ConvNet().to(memory_format=torch.channels_last), data=_images(), optimizer=adamw
    )


@entry("group norms")
def group_norm() -> paceline.Job:
    return make_job(lambda: ConvNet(lambda: nn.GroupNorm(2, 4)), data=_images())


@entry("instance norms with weights")
def instance_norm() -> paceline.Job:
    return make_job(lambda: ConvNet(lambda: nn.InstanceNorm2d(4, affine=True)), data=_images())


@entry("instance norms that keep running statistics: coupled buffers")
def instance_norm_running() -> paceline.Job:
    norm = lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True)  # noqa: E731
    return make_job(lambda: ConvNet(norm), data=_images())


@entry("batch norms of images")
def batch_norm_2d() -> paceline.Job:
    return make_job(lambda: ConvNet(lambda: nn.BatchNorm2d(4)), data=_images())


@entry("one-dimensional, dilated and grouped convolutions")
def conv1d() -> paceline.Job:
    model = lambda: nn.Sequential(  # noqa: E731
        nn.Conv1d(2, 4, 3, padding=1),
        nn.Tanh(),
        nn.Conv1d(4, 4, 3, dilation=2, padding=2, groups=2),
        nn.Tanh(),
        nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.Flatten(),
        nn.Linear(32, 3),
    )
    return make_job(model, data=TensorDataset(numbers(SAMPLES, 2, 8), numbers(SAMPLES, 3, seed=3)))


@entry("transposed convolutions and upsampling: an autoencoder of images")
def transposed_convolutions() -> paceline.Job:
    model = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 4, 2, stride=2),
        nn.ReLU(),
        nn.Conv2d(4, 2, 1),
    )
    x = numbers(SAMPLES, 2, 8, 8)
    return make_job(model, data=TensorDataset(x, x))


class UNet(nn.Module):
    """Down, up, and skips between them."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)])
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv2d(16, 4, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1)])

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = torch.relu(layer(x))
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = torch.relu(self.middle(x))
        for layer in self.up:
            x = layer(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        return x


@entry("a U-Net with its skips")
def unet() -> paceline.Job:
    x = numbers(SAMPLES, 2, 8, 8)
    return make_job(UNet, data=TensorDataset(x, x.roll(1, 2)), optimizer=adamw)


class DenseNet(nn.Module):
    """Each layer reads what all layers before have made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(2 + 2 * i, 2, 3, padding=1) for i in range(4)])
        self.last = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for layer in self.layers:
            made.append(torch.tanh(layer(torch.cat(made, 1))))
        return self.last(torch.cat(made, 1).mean((2, 3)))


@entry("dense skips from every layer to all later ones")
def dense_skips() -> paceline.Job:
    return make_job(DenseNet, data=_images())


@entry("squeeze and excitation, depthwise convolutions")
def squeeze_and_excitation() -> paceline.Job:
    class Squeeze(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.deep, self.point = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Conv2d(4, 4, 1)
            self.gate = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 4), nn.Sigmoid())

        def forward(self, x: Tensor) -> Tensor:
            x = self.point(self.deep(x))
            return x * self.gate(x.mean((2, 3)))[..., None, None]

    class Model(ConvNet):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Squeeze() for _ in range(3)])

    return make_job(Model, data=_images())


@entry("three-dimensional convolutions")
def conv3d() -> paceline.Job:
    model = lambda: nn.Sequential(  # noqa: E731
        nn.Conv3d(1, 2, 2),
        nn.ReLU(),
        nn.Conv3d(2, 2, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    return make_job(
        model, data=TensorDataset(numbers(SAMPLES, 1, 4, 4, 4), numbers(SAMPLES, 3, seed=3))
    )


@entry("pixel shuffling and adaptive pools")
def pixel_shuffle() -> paceline.Job:
    model = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(2, 8, 3, padding=1),
        nn.PixelShuffle(2),
        nn.ReLU(),
        nn.Conv2d(2, 2, 3),
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        nn.Linear(18, 3),
    )
    return make_job(model, data=_images())
