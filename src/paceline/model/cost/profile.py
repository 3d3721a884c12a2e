"""A job's cost on one device, piece by piece: values alone, so that planning needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar, get_args

Side = Literal["rows", "columns", "inner", "count"]
ProductKind = Literal[
    "linear", "attention", "full attention", "convolution", "small convolution", "recurrent"
]


@dataclass(frozen=True, slots=True)
class Affine:
    """A figure that grows with the samples of a micro-batch: fixed + per_sample * samples."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, samples: float) -> float:
        return self.fixed + self.per_sample * samples

    def times(self, factor: float) -> Affine:
        """As much of it.

        >>> Affine(4.0, 2.0).times(0.5)
        Affine(fixed=2.0, per_sample=1.0)
        """
        return Affine(self.fixed * factor, self.per_sample * factor)

    @classmethod
    def through(cls, first: tuple[float, float], second: tuple[float, float]) -> Affine:
        """The line through two (samples, figure) points.

        >>> Affine.through((2, 30.0), (4, 50.0))
        Affine(fixed=10.0, per_sample=10.0)
        """
        (x, y), (other_x, other_y) = first, second
        per_sample = (other_y - y) / (other_x - x)
        return cls(y - per_sample * x, per_sample)


@dataclass(frozen=True, slots=True)
class Product:
    """`count` matrix products of one shape: rows x inner times inner x columns. Sides are those of one sample.

    grows: the side that grows with the samples of a micro-batch.
    cut: the side that ranks of a tensor axis divide; None if each does all of it.
    kind: attention's two are done together by fused kernels, "full" if nothing is masked or the mask is a tensor, which
        no kernel skips; a "small convolution" is of 3x3 or 5x5 without stride, for which there are algorithms with
        fewer multiplications; "recurrent" ones run one after another, and no tensor axis divides them.
    """

    rows: float
    columns: float
    inner: float
    count: float = 1.0
    grows: Side = "rows"
    cut: Side | None = None
    kind: ProductKind = "linear"

    @property
    def flops(self) -> float:
        """Of one sample; a multiplication and an addition are two."""
        return 2.0 * self.rows * self.columns * self.inner * self.count

    @property
    def values(self) -> float:
        """In its three matrices."""
        return self.count * (
            self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        )

    def backward(self) -> tuple[Product, Product]:
        """The products that give the gradients of its left and of its right side.

        >>> Product(8, 6, 4, cut="columns").backward()[1]
        Product(rows=4, columns=6, inner=8, count=1.0, grows='inner', cut='columns', kind='linear')
        """
        left: dict[Side, Side] = {
            "rows": "rows",
            "columns": "inner",
            "inner": "columns",
            "count": "count",
        }
        right: dict[Side, Side] = {
            "rows": "inner",
            "columns": "columns",
            "inner": "rows",
            "count": "count",
        }

        def turned(sides: dict[Side, Side], rows: float, columns: float, inner: float) -> Product:
            return Product(
                rows,
                columns,
                inner,
                self.count,
                sides[self.grows],
                self.cut and sides[self.cut],
                self.kind,
            )

        return (
            turned(left, self.rows, self.inner, self.columns),
            turned(right, self.inner, self.columns, self.rows),
        )


def growing(
    first: Sequence[Product], second: Sequence[Product], *, samples: tuple[int, int]
) -> tuple[Product, ...]:
    """Products of one sample, from what was multiplied with two numbers of samples. One whose shape does not grow along
    one side is left out, and so are all where the two don't do the same.

    >>> growing([Product(16, 4, 3)], [Product(32, 4, 3)], samples=(2, 4))
    (Product(rows=8.0, columns=4, inner=3, count=1.0, grows='rows', cut=None, kind='linear'),)
    """
    if [p.kind for p in first] != [p.kind for p in second]:
        return ()
    products = []
    for product, grown in zip(first, second, strict=True):
        changed = [
            side for side in get_args(Side) if getattr(product, side) != getattr(grown, side)
        ]
        if (
            len(changed) == 1
            and getattr(product, changed[0]) * samples[1] == getattr(grown, changed[0]) * samples[0]
        ):
            each: dict[str, Any] = {
                changed[0]: getattr(product, changed[0]) / samples[0],
                "grows": changed[0],
            }
            products.append(replace(product, **each))
    return tuple(products)


@dataclass(frozen=True, slots=True)
class Fused:
    """What a compiler that fuses operators makes of some work; see `model/cost/fusion.py`.

    spared_bytes: of those that are moved, what is neither read nor written any more.
    spared_operators: that are not launched any more.
    kernels: that are left of the operators, beside products.
    """

    spared_bytes: Affine = Affine()
    spared_operators: float = 0.0
    kernels: float = 0.0

    def times(self, factor: float) -> Fused:
        """As much of it."""
        return Fused(
            self.spared_bytes.times(factor), self.spared_operators * factor, self.kernels * factor
        )


@dataclass(frozen=True, slots=True)
class Work:
    """What a device does in one direction of a segment, or in the update.

    flops: of matrix products, convolutions and attention; a multiplication and an addition are two.
    moved_bytes: read and written by plain arithmetic and copies, which wait for memory.
    function_bytes: read and written by all other operators (activation functions, norms, softmax, pooling),
        which compute more than they wait.
    operators: launched, however many samples there are; views are not counted.
    products: what `flops` consists of, where shapes are known.
    fused: what is different where operators are fused.
    normed_channels: of each batch norm that takes its batch's own statistics.
    spared: what fusing has spared, which the other figures leave out.
    """

    flops: Affine = Affine()
    moved_bytes: Affine = Affine()
    function_bytes: Affine = Affine()
    operators: float = 0.0
    products: tuple[Product, ...] = ()
    fused: Fused = Fused()
    normed_channels: tuple[int, ...] = field(default=(), compare=False)
    spared: Fused = Fused()

    def times(self, factor: float) -> Work:
        """So much of the same work: products keep their shapes, and there are more or fewer of them."""
        if factor == 1:
            return self
        return Work(
            self.flops.times(factor),
            self.moved_bytes.times(factor),
            self.function_bytes.times(factor),
            self.operators * factor,
            tuple(replace(p, count=p.count * factor) for p in self.products),
            self.fused.times(factor),
            self.normed_channels,
            self.spared.times(factor),
        )


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter, in the model's own order.

    unit: name of the unit (`model.units`) that owns it; "" for the root.
    rows: its size along dim 0, the one that sharding splits.
    state_bytes: what the optimizer keeps for it; 0 if it is frozen.
    count: how many of it there are, one in each repetition of its unit; other figures are of one.
    gradient_part: bytes of its gradient a byte of its own; 1 where both have the same type.
    is_cut: whether ranks of a tensor axis hold parts of it.
    is_sparse: whether its gradient is sparse; it is priced as a dense one, which is at least as large.
    gathered_part: bytes that sharding gathers a byte of it, where it may gather a lower precision.
    """

    name: str
    unit: str
    num_bytes: int
    rows: int
    dtype: str = "float32"
    trainable: bool = True
    state_bytes: int = 0
    count: int = 1
    gradient_part: float = 1.0
    is_cut: bool = False
    is_sparse: bool = False
    gathered_part: float = 1.0

    @property
    def gradient_bytes(self) -> int:
        """A gradient has its parameter's shape."""
        return round(self.num_bytes * self.gradient_part) if self.trainable else 0


@dataclass(frozen=True, slots=True)
class Exchange:
    """A message of the ranks of a tensor axis. num_bytes: of the whole tensor that all of them have a part of."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter"]
    num_bytes: float


@dataclass(frozen=True, slots=True)
class TensorCut:
    """What ranks of a tensor axis divide of a segment, and what they exchange. Bytes are of one rank without them.

    What is not divided here is divided too where activations between layers are cut along the sequence.

    forward_bytes, backward_bytes: of functions on tensors that each rank has a part of.
    kept_bytes: of activations kept of such tensors.
    exchanged_bytes: of the tensor that ranks sum.
    forward_exchanges, backward_exchanges: how often.
    counted: of a segment that is one rank's part already, what it exchanges in forward and in backward.
    """

    forward_bytes: Affine = Affine()
    backward_bytes: Affine = Affine()
    kept_bytes: Affine = Affine()
    exchanged_bytes: Affine = Affine()
    forward_exchanges: int = 0
    backward_exchanges: int = 0
    counted: tuple[tuple[Exchange, ...], tuple[Exchange, ...]] | None = None


@dataclass(frozen=True, slots=True)
class Core:
    """The part of a segment that selective recomputation does again: attention between its products.

    forward: its work. kept_bytes: what it keeps. All of it is divided by a tensor axis.
    """

    forward: Work = Work()
    kept_bytes: Affine = Affine()


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the forward pass and of the backward pass that belongs to it.

    Bytes are of activations: everything that lives in a pass but parameters, their gradients and the batch itself.

    unit: the unit that runs in it; "" for what lies between units.
    kept_bytes: by how much its forward raises what is alive (negative where it lets go of more than it keeps).
    output_bytes: its result, which is what the next segment keeps of it under recomputation.
    forward_peak_bytes: most alive during its forward, above the level at its start.
    backward_peak_bytes: most alive during its backward, above the level at the end of its forward.
    gradients: names of the parameters whose gradients its backward completes.
    borrows: names of parameters that it uses and another segment completes.
    repeat: how many such segments follow each other; figures are of one.
    core: what selective recomputation does again; None where nothing is known of it.
    again: the part of its forward that full recomputation does again; None where it is all of it, or nothing is known.
        torch stops as soon as it has what autograd kept last: a product's inputs, so that a last product is spared.
    kept_tensors: how many tensors autograd keeps in its forward, parameters among them; 0 where nothing is known of it.
    tensor: what a tensor axis divides; None where nothing is known of it.
    """

    unit: str = ""
    forward: Work = Work()
    backward: Work = Work()
    kept_bytes: Affine = Affine()
    output_bytes: Affine = Affine()
    forward_peak_bytes: Affine = Affine()
    backward_peak_bytes: Affine = Affine()
    gradients: tuple[str, ...] = ()
    borrows: tuple[str, ...] = ()
    repeat: int = 1
    core: Core | None = None
    again: Work | None = None
    kept_tensors: int = 0
    tensor: TensorCut | None = None


Figures = TypeVar("Figures", Affine, Fused, Work, Core, Segment)


def growing_figures(first: Figures, second: Figures, *, samples: tuple[int, int]) -> Figures:
    """The lines through the same figures with two numbers of samples, for which each of them is fixed.

    What does not grow is the first one's, and what one of the two lacks is left out.
    """
    if isinstance(first, Affine):
        return Affine.through((samples[0], first.fixed), (samples[1], second.fixed))
    grown: dict[str, Any] = {}
    for name in (f.name for f in fields(first)):
        small, large = getattr(first, name), getattr(second, name)
        if name == "products":
            grown[name] = growing(small, large, samples=samples)
        elif large is None:
            grown[name] = None
        elif isinstance(small, Affine | Fused | Work | Core):
            grown[name] = growing_figures(small, large, samples=samples)
    return replace(first, **grown)


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """A job's cost on one device. Compared by identity, so that what was made of one is found quickly.

    parameters: in the model's own order.
    segments: in the order of the forward pass; backward takes them the other way round.
    statistics_bytes: of the buffers BatchNorm's running statistics, which every forward writes.
    batch_bytes: inputs and targets of a micro-batch.
    update: clipping and the optimizer's step on whole parameters.
    update_peak_bytes: what the update holds for a moment, above its state.
    notes: which figures are rough, and why. Empty if all come from the job's own program.
    gathered_part: bytes that sharding gathers a byte of parameters; below 1 where it gathers a lower precision.
    reduced_part: bytes that replicas send each other a byte of gradients.
    is_layered: whether the model can be cut anywhere between its segments and repetitions.
    recurrent: units that hold an nn.RNN, nn.GRU or nn.LSTM; "" is a model without units.
    """

    parameters: tuple[Parameter, ...]
    segments: tuple[Segment, ...]
    buffer_bytes: int = 0
    statistics_bytes: int = 0
    batch_bytes: Affine = Affine()
    update: Work = Work()
    update_peak_bytes: int = 0
    notes: tuple[str, ...] = ()
    gathered_part: float = 1.0
    reduced_part: float = 1.0
    is_layered: bool = False
    recurrent: tuple[str, ...] = ()
    _by_unit: dict[str, tuple[Parameter, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        units: dict[str, list[Parameter]] = {}
        for parameter in self.parameters:
            units.setdefault(parameter.unit, []).append(parameter)
        object.__setattr__(self, "_by_unit", {unit: tuple(owned) for unit, owned in units.items()})

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the units, without the root."""
        return tuple(unit for unit in self._by_unit if unit)

    def owned_by(self, unit: str) -> tuple[Parameter, ...]:
        """A unit's parameters; of the root for ""."""
        return self._by_unit.get(unit, ())

    def part(self, parameters: tuple[Parameter, ...], segments: tuple[Segment, ...]) -> Profile:
        """What a rank with these parameters and segments computes. Its update is in proportion to its gradients. What
        it holds of the batch is counted apart."""
        own_bytes, all_bytes = (
            sum(p.gradient_bytes * p.count for p in listed)
            for listed in (parameters, self.parameters)
        )
        part = own_bytes / all_bytes if all_bytes else 0.0
        return replace(
            self,
            parameters=parameters,
            segments=segments,
            batch_bytes=Affine(),
            update=self.update.times(part),
            update_peak_bytes=round(part * self.update_peak_bytes),
        )

    @property
    def parameter_bytes(self) -> int:
        return sum(p.num_bytes * p.count for p in self.parameters)


def folded(profile: Profile) -> Profile:
    """The same cost with segments of units that are alike and follow each other as one that repeats. The sums of batch
    norms and the count of kept tensors are left out: devices that are described need no time for them."""
    profile = replace(
        profile,
        segments=tuple(
            replace(s, forward=replace(s.forward, normed_channels=()), kept_tensors=0)
            for s in profile.segments
        ),
    )
    known = {p.name: p for p in profile.parameters}
    often: Counter[str] = Counter(s.unit for s in profile.segments)
    borrowed = {name for s in profile.segments for name in s.borrows if known[name].unit != s.unit}
    segments: list[Segment] = []
    counts: dict[str, int] = {}
    for segment in profile.segments:
        of_unit = profile.owned_by(segment.unit)
        alone = (
            bool(segment.unit)
            and often[segment.unit] == 1
            and not borrowed.intersection(p.name for p in of_unit)
            and {known[name].unit for name in (*segment.gradients, *segment.borrows)}
            <= {segment.unit}
        )
        last = segments[-1] if segments else Segment()
        if alone and last.unit in counts and _shape(profile, last) == _shape(profile, segment):
            segments[-1] = replace(last, repeat=last.repeat + 1)
            counts[last.unit] += 1
            counts[segment.unit] = 0
            continue
        segments.append(segment)
        if alone:
            counts[segment.unit] = 1
    parameters = tuple(
        replace(p, count=p.count * counts.get(p.unit, 1))
        for p in profile.parameters
        if counts.get(p.unit, 1)
    )
    return replace(profile, parameters=parameters, segments=tuple(segments))


def _shape(profile: Profile, segment: Segment) -> tuple[object, ...]:
    """What segments that are alike have in common: all but the names."""
    parameters = profile.owned_by(segment.unit)
    return (
        replace(segment, unit="", gradients=(), borrows=(), repeat=1),
        [name.removeprefix(f"{segment.unit}.") for name in (*segment.gradients, *segment.borrows)],
        [
            replace(p, name=p.name.removeprefix(f"{segment.unit}."), unit="", count=1)
            for p in parameters
        ],
    )
