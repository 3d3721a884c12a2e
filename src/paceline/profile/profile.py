"""A job's cost on one device, piece by piece: values alone, so that planning needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Affine:
    """A figure that grows with the samples of a micro-batch: fixed + per_sample * samples."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, samples: float) -> float:
        return self.fixed + self.per_sample * samples

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
class Work:
    """What a device does in one direction of a segment, or in the update.

    flops: of matrix products, convolutions and attention; a multiplication and an addition are two.
    moved_bytes: read and written by plain arithmetic and copies, which wait for memory.
    function_bytes: read and written by all other operators (activation functions, norms, softmax, pooling),
        which compute more than they wait.
    operators: launched, however many samples there are; views are not counted.
    """

    flops: Affine = Affine()
    moved_bytes: Affine = Affine()
    function_bytes: Affine = Affine()
    operators: float = 0.0


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter, in the model's own order.

    unit: name of the unit (`strategies.units`) that owns it; "" for the root.
    rows: its size along dim 0, the one that sharding splits.
    state_bytes: what the optimizer keeps for it; 0 if it is frozen.
    """

    name: str
    unit: str
    num_bytes: int
    rows: int
    dtype: str = "float32"
    trainable: bool = True
    state_bytes: int = 0

    @property
    def gradient_bytes(self) -> int:
        """A gradient has its parameter's type and shape."""
        return self.num_bytes if self.trainable else 0


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
    """

    unit: str = ""
    forward: Work = Work()
    backward: Work = Work()
    kept_bytes: Affine = Affine()
    output_bytes: Affine = Affine()
    forward_peak_bytes: Affine = Affine()
    backward_peak_bytes: Affine = Affine()
    gradients: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Profile:
    """A job's cost on one device.

    parameters: in the model's own order.
    segments: in the order of the forward pass; backward takes them the other way round.
    batch_bytes: inputs and targets of a micro-batch.
    update: clipping and the optimizer's step on whole parameters.
    update_peak_bytes: what the update holds for a moment, above its state.
    notes: which figures are rough, and why. Empty if all come from the job's own program.
    """

    parameters: tuple[Parameter, ...]
    segments: tuple[Segment, ...]
    buffer_bytes: int = 0
    batch_bytes: Affine = Affine()
    update: Work = Work()
    update_peak_bytes: int = 0
    notes: tuple[str, ...] = ()
    _by_unit: dict[str, tuple[Parameter, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        units: dict[str, list[Parameter]] = {}
        for parameter in self.parameters:
            units.setdefault(parameter.unit, []).append(parameter)
        object.__setattr__(self, "_by_unit", {unit: tuple(owned) for unit, owned in units.items()})

    @property
    def exact(self) -> bool:
        """Whether the figures come from the job's own program rather than from assumptions."""
        return not self.notes

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the units, without the root."""
        return tuple(unit for unit in self._by_unit if unit)

    def owned_by(self, unit: str) -> tuple[Parameter, ...]:
        """A unit's parameters; of the root for ""."""
        return self._by_unit.get(unit, ())

    @property
    def parameter_bytes(self) -> int:
        return sum(p.num_bytes for p in self.parameters)

    @property
    def forward_flops_per_sample(self) -> float:
        return sum(s.forward.flops.per_sample for s in self.segments)

    @property
    def backward_flops_per_sample(self) -> float:
        return sum(s.backward.flops.per_sample for s in self.segments)
