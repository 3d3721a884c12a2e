"""The convolutional nets of published image benchmarks, by dimensions.

Sources: Krizhevsky 2014 (AlexNet, one tower); Simonyan and Zisserman 2015 (VGG-16); Szegedy et al. 2016 (Inception v3);
He et al. 2016 (residual nets).
"""

from __future__ import annotations

from benchmarks.models.convolution import Conv, ConvNetSize, Stretch, stretches

ALEXNET = [
    Stretch((Conv(3, 64, (11, 11), 55, 4, has_norm=False),), pool=2),
    Stretch((Conv(64, 192, (5, 5), 27, has_norm=False),), pool=2),
    Stretch(
        (
            Conv(192, 384, (3, 3), 13, has_norm=False),
            Conv(384, 384, (3, 3), 13, has_norm=False),
            Conv(384, 256, (3, 3), 13, has_norm=False),
        ),
        pool=2,
    ),
    Stretch(linear=((256 * 36, 4096), (4096, 4096), (4096, 1000))),
]


def _vgg16() -> list[Stretch]:
    net, channels, side = [], 3, 224
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        convs = []
        for _ in range(depth):
            convs.append(Conv(channels, width, (3, 3), side, has_norm=False))
            channels = width
        net.append(Stretch(tuple(convs), pool=2))
        side //= 2
    return [*net, Stretch(linear=((512 * 49, 4096), (4096, 4096), (4096, 1000)))]


def _inception3() -> list[Stretch]:
    stem = (
        Conv(3, 32, (3, 3), 149, 2),
        Conv(32, 32, (3, 3), 147),
        Conv(32, 64, (3, 3), 147),
        Conv(64, 80, (1, 1), 73),
        Conv(80, 192, (3, 3), 71),
    )
    net = [Stretch(stem, pool=2)]
    inputs = 192
    for pooled in (32, 64, 64):
        net.append(
            Stretch(
                (
                    Conv(inputs, 64, (1, 1), 35),
                    Conv(inputs, 48, (1, 1), 35),
                    Conv(48, 64, (5, 5), 35),
                    Conv(inputs, 64, (1, 1), 35),
                    Conv(64, 96, (3, 3), 35),
                    Conv(96, 96, (3, 3), 35),
                    Conv(inputs, pooled, (1, 1), 35),
                )
            )
        )
        inputs = 224 + pooled
    net.append(
        Stretch(
            (
                Conv(288, 384, (3, 3), 17, 2),
                Conv(288, 64, (1, 1), 35),
                Conv(64, 96, (3, 3), 35),
                Conv(96, 96, (3, 3), 17, 2),
            )
        )
    )
    for c in (128, 160, 160, 192):
        net.append(
            Stretch(
                (
                    Conv(768, 192, (1, 1), 17),
                    Conv(768, c, (1, 1), 17),
                    Conv(c, c, (1, 7), 17),
                    Conv(c, 192, (7, 1), 17),
                    Conv(768, c, (1, 1), 17),
                    Conv(c, c, (7, 1), 17),
                    Conv(c, c, (1, 7), 17),
                    Conv(c, c, (7, 1), 17),
                    Conv(c, 192, (1, 7), 17),
                    Conv(768, 192, (1, 1), 17),
                )
            )
        )
    net.append(
        Stretch(
            (
                Conv(768, 192, (1, 1), 17),
                Conv(192, 320, (3, 3), 8, 2),
                Conv(768, 192, (1, 1), 17),
                Conv(192, 192, (1, 7), 17),
                Conv(192, 192, (7, 1), 17),
                Conv(192, 192, (3, 3), 8, 2),
            )
        )
    )
    for inputs in (1280, 2048):
        net.append(
            Stretch(
                (
                    Conv(inputs, 320, (1, 1), 8),
                    Conv(inputs, 384, (1, 1), 8),
                    Conv(384, 384, (1, 3), 8),
                    Conv(384, 384, (3, 1), 8),
                    Conv(inputs, 448, (1, 1), 8),
                    Conv(448, 384, (3, 3), 8),
                    Conv(384, 384, (1, 3), 8),
                    Conv(384, 384, (3, 1), 8),
                    Conv(inputs, 192, (1, 1), 8),
                )
            )
        )
    return [*net, Stretch(linear=((2048, 1000),))]


def _residual(*depths: int) -> list[Stretch]:
    return stretches(ConvNetSize(depths, form="bottleneck"))


NETS: dict[str, list[Stretch]] = {
    "alexnet": ALEXNET,
    "vgg16": _vgg16(),
    "inceptionv3": _inception3(),
    "resnet50": _residual(3, 4, 6, 3),
    "resnet101": _residual(3, 4, 23, 3),
    "resnet152": _residual(3, 8, 36, 3),
}
