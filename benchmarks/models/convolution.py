"""The cost of a convolutional net on one device, from its dimensions alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.models.formats import FLOAT32, Formats
from paceline.model.cost.profile import Affine, Parameter, Product, Profile, Segment, Work

TARGET_BYTES = 8


@dataclass(frozen=True, slots=True)
class Conv:
    """A convolution, with a norm after it or a bias."""

    inputs: int
    outputs: int
    kernel: tuple[int, int]
    side: int  # of its square output
    stride: int = 1
    has_norm: bool = True

    @property
    def num_parameters(self) -> int:
        return self.inputs * self.outputs * self.kernel[0] * self.kernel[1] + self.outputs * (
            2 if self.has_norm else 1
        )

    @property
    def output_values(self) -> int:
        return self.outputs * self.side**2

    @property
    def product(self) -> Product:
        """The product of matrices with the same arithmetic."""
        is_small = self.kernel in ((3, 3), (5, 5)) and self.stride == 1
        return Product(
            self.side**2,
            self.outputs,
            self.inputs * self.kernel[0] * self.kernel[1],
            kind="small convolution" if is_small else "convolution",
        )


@dataclass(frozen=True, slots=True)
class Stretch:
    """Convolutions that run one after another, with a shortcut past them if there is one."""

    convs: tuple[Conv, ...] = ()
    past: Conv | None = None  # the convolution of the shortcut
    repeat: int = 1  # the number of equal stretches
    linear: tuple[tuple[int, int], ...] = ()  # matrices (inputs, outputs) after the convolutions
    adds: bool = False  # whether the shortcut's values are added
    pool: int = 1  # stride of a pooling after the stretch


@dataclass(frozen=True, slots=True)
class ConvNetSize:
    """The dimensions of a residual net (He et al. 2016)."""

    depths: tuple[int, ...] = (2, 2, 2, 2)  # blocks of each stage
    width: int = 64  # channels of the first stage
    classes: int = 1000
    side: int = 224  # of the square images, a multiple of 4 * 2 ** (stages - 1)
    # A "basic" block has two convolutions of 3x3. A "bottleneck" has 1x1, 3x3 and 1x1, the last to
    # four times as many channels.
    form: Literal["basic", "bottleneck"] = "basic"


def stretches(size: ConvNetSize) -> list[Stretch]:
    """Return the net's stem, the first block of each stage, its other blocks, which are equal, and
    the head.
    """
    network = [Stretch((Conv(3, size.width, (7, 7), size.side // 2, 2),), pool=2)]
    channels, side, times = size.width, size.side // 4, 4 if size.form == "bottleneck" else 1
    for stage, depth in enumerate(size.depths):
        width, stride = size.width * 2**stage, 1 if stage == 0 else 2
        side //= stride
        is_plain = channels == width * times and stride == 1
        past = None if is_plain else Conv(channels, width * times, (1, 1), side, stride)
        network.append(Stretch(_convs(size, channels, width, side, stride), past, adds=True))
        channels = width * times
        if depth > 1:
            network.append(
                Stretch(_convs(size, channels, width, side, 1), repeat=depth - 1, adds=True)
            )
    return [*network, Stretch(linear=((channels, size.classes),))]


def blocks(size: ConvNetSize) -> list[Stretch]:
    """Return the net's stretches one by one, without the head."""
    return [replace(each, repeat=1) for each in stretches(size)[:-1] for _ in range(each.repeat)]


def _convs(
    size: ConvNetSize, channels: int, width: int, side: int, stride: int
) -> tuple[Conv, ...]:
    if size.form == "basic":
        return Conv(channels, width, (3, 3), side, stride), Conv(width, width, (3, 3), side)
    return (
        Conv(channels, width, (1, 1), side * stride),
        Conv(width, width, (3, 3), side, stride),
        Conv(width, 4 * width, (1, 1), side),
    )


def convnet_profile(
    net: ConvNetSize | list[Stretch], formats: Formats = FLOAT32, *, side: int = 224
) -> Profile:
    """Return the profile of training a net. A sample is an image.

    Args:
        side: The side of the images, for a net that is given as stretches.
    """
    listed, side = (stretches(net), net.side) if isinstance(net, ConvNetSize) else (net, side)
    parameters: list[Parameter] = []
    segments = []
    for number, stretch in enumerate(listed):
        name = f"{number}.weights"
        convs = (*stretch.convs, *((stretch.past,) if stretch.past else ()))
        values = sum(conv.num_parameters for conv in convs) + sum(
            (a + 1) * b for a, b in stretch.linear
        )
        parameters.append(
            Parameter(
                name,
                str(number),
                values * formats.weight,
                rows=values,
                state_bytes=values * formats.state,
                count=stretch.repeat,
                gradient_part=formats.gradient / formats.weight,
            )
        )
        segments.append(_segment(stretch, str(number), name, formats, is_first=number == 0))
    values = sum(p.num_bytes * p.count for p in parameters) // formats.weight
    return Profile(
        tuple(parameters),
        tuple(segments),
        batch_bytes=Affine(0, 3 * side**2 * formats.activation + TARGET_BYTES),
        update=Work(
            moved_bytes=Affine(
                values * (2 * formats.state + formats.gradient + 2 * formats.weight)
            ),
            operators=4,
        ),
        gathered_part=formats.gathered / formats.weight,
        reduced_part=formats.reduced / formats.gradient,
        is_layered=True,
    )


def _segment(
    stretch: Stretch, unit: str, name: str, formats: Formats, *, is_first: bool
) -> Segment:
    convs = (*stretch.convs, *((stretch.past,) if stretch.past else ()))
    forward = [conv.product for conv in convs] + [Product(1, b, a) for a, b in stretch.linear]
    backward = [product for p in forward for product in p.backward()]
    if is_first:  # nobody asks for the images' gradient
        backward.pop(0)
    values = sum(conv.output_values for conv in convs)
    normed = sum(conv.output_values for conv in convs if conv.has_norm)
    added = stretch.convs[-1].output_values if stretch.adds else 0
    outputs = sum(b for _, b in stretch.linear)
    # A convolution writes; a norm reads twice and writes; ReLU reads and writes; a sum reads two
    # and writes.
    forward_values = 3 * normed + 2 * (values - added) + 5 * added + 2 * outputs
    backward_values = 5 * normed + 3 * (values - added) + 3 * added + 3 * outputs
    last = stretch.convs[-1].output_values if stretch.convs else outputs
    kept = values + normed + outputs
    if stretch.pool > 1:
        last //= stretch.pool**2
        kept += 3 * last  # with the places of the maxima, which take two values each
    item = formats.activation
    return Segment(
        unit,
        Work(
            Affine(0, sum(p.flops for p in forward)),
            function_bytes=Affine(0, item * forward_values),
            operators=3 * len(convs) + len(stretch.linear),
            products=tuple(forward),
        ),
        Work(
            Affine(0, sum(p.flops for p in backward)),
            function_bytes=Affine(0, item * backward_values),
            operators=5 * len(convs) + 2 * len(stretch.linear),
            products=tuple(backward),
        ),
        kept_bytes=Affine(0, item * kept),
        output_bytes=Affine(0, item * last),
        forward_peak_bytes=Affine(0, item * kept),
        backward_peak_bytes=Affine(0, 2 * item * max(last, values // 2)),
        gradients=(name,),
        repeat=stretch.repeat,
    )
